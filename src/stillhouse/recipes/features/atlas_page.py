"""The frame of the atlas: its HTML and look, without any content; no scripts, no requests."""

SHELL = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; \
style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{title}</h1><p class="quiet">{state}</p></header>
{pictures}
{drawing}
<p class="switch"><input type="checkbox" id="kept"><label for="kept">only what is kept</label>
</p>
<main>
{sections}
</main>
<footer class="quiet">{notes}</footer>
</body>
</html>
"""

STYLE = """
:root { --paper: #fff; --ink: #1b1f24; --quiet: #5d6670; --hair: #e3e6ea; --tint: #f5f6f8;
  --good: #0f7a4d; --line: #0072b2; }
@media screen and (prefers-color-scheme: dark) {
  :root { --paper: #15181c; --ink: #e6e8eb; --quiet: #9aa4af; --hair: #2d333a; --tint: #1e2329;
    --good: #35c99c; --line: #56b4e9; } }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
body { margin: 0 auto; padding: 28px 20px 48px; max-width: 1280px; color: var(--ink);
  background: var(--paper); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
h1 { font-size: 26px; line-height: 1.2; margin: 0; }
h2 { font-size: 18px; margin: 0 0 4px; }
.quiet { color: var(--quiet); font-size: 13px; }
a { color: inherit; text-decoration: none; }
section { margin-top: 24px; padding-top: 16px; border-top: 1px solid var(--hair); }
section > p { margin: 0 0 12px; }
.images { display: flex; gap: 6px; margin: 14px 0; }
.images img { width: 96px; height: 96px; object-fit: contain; background: var(--tint);
  image-rendering: pixelated; }
figure { margin: 0 0 8px; }
.drawing svg { display: block; width: 100%; height: auto; background: var(--tint);
  border-radius: 6px; }
.drawing text { fill: var(--quiet); font-size: 12px; }
.drawing .path { fill: none; stroke: var(--hair); stroke-width: 2; }
.drawing circle { stroke: none; }
.drawing .k { fill: none; stroke: var(--good); stroke-width: 2; }
.drawing a:hover circle { stroke: var(--line); stroke-width: 3; }
.cards { display: grid; gap: 12px; grid-template-columns: repeat(auto-fill, minmax(250px, 1fr)); }
article { border: 1px solid var(--hair); border-radius: 6px; padding: 10px; }
article:target { outline: 2px solid var(--line); }
article.kept { border-color: var(--good); }
article h3 { margin: 0; font-size: 13px; line-height: 1.35; }
article p { margin: 4px 0 0; font-size: 12px; }
article .why { color: var(--quiet); }
article.kept .why { color: var(--good); }
article .strip { display: flex; gap: 3px; margin-top: 6px; }
article .strip img { flex: 1 1 0; min-width: 0; max-width: 110px; aspect-ratio: 1;
  image-rendering: pixelated; }
dl { display: grid; grid-template-columns: repeat(4, 1fr); margin: 6px 0 0; font-size: 12px; }
dt { color: var(--quiet); }
dd { margin: 0; grid-row: 2; }
.switch { margin: 12px 0 0; font-size: 13px; }
.switch input { margin: 0 6px 0 0; vertical-align: -2px; accent-color: var(--line); }
body:has(#kept:checked) article:not(.kept) { display: none; }
body:has(#kept:checked) section:not(:has(article.kept)) { display: none; }
footer { margin-top: 32px; }
@media print { .switch { display: none; } article { break-inside: avoid; } }
"""
