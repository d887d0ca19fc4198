"""The look of the demo's page, over gradio's own colours (light and dark)."""

NOTHING = "<div class='empty'>nothing here yet</div>"

STYLE = """
.gradio-container { width: 100%; max-width: 1280px !important; margin: 0 auto !important;
  font-variant-numeric: tabular-nums; }
.gradio-container h1 { font-size: 26px; line-height: 1.2; font-weight: 700; margin: 0; }
.gradio-container h2 { font-size: 15px; line-height: 1.3; font-weight: 600; margin: 0; }
#head .html-container, #note .html-container, [id$=-panel] .html-container { padding: 0; }
#note:not(:has(.note)) { display: none; }
#activation input { font-size: 13px; }
.quiet, .panel figcaption, .panel .empty { color: #5d6670; font-size: 13px; }
.dark .quiet, .dark .panel figcaption, .dark .panel .empty { color: #9aa4af; }
.note { margin: 4px 0; padding: 10px 14px; border-radius: 6px; font-size: 15px;
  color: #8c1d10; background: #fdece9; border: 1px solid #f3b6ac; }
.dark .note { color: #ffb4a8; background: #3a1a16; border-color: #7a2e24; }
.panel { padding: 14px; border: 1px solid var(--border-color-primary); border-radius: 8px;
  background: var(--background-fill-primary); }
.panel header { display: flex; align-items: baseline; gap: 8px; margin-bottom: 10px; }
.panel .tiles { display: grid; gap: 6px; grid-template-columns: repeat(var(--columns), 1fr); }
.panel .tiles img { display: block; width: 100%; height: auto; border-radius: 4px; margin: 0; }
.panel .tiles img.small { image-rendering: pixelated; }
.panel .time { margin: 12px 0 0; font-size: 16px; }
.panel .quiet { margin: 4px 0 0; }
.panel figure { margin: 0; }
.panel figcaption { margin-top: 6px; overflow-wrap: anywhere; }
.panel .empty { display: grid; place-items: center; aspect-ratio: 1; max-height: 420px;
  width: 100%; border-radius: 4px; background: var(--background-fill-secondary); }
"""
