"""The frame of the report: its HTML, look and script, without any content."""

SHELL = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; \
style-src 'unsafe-inline'; script-src 'sha256-{script_hash}'; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{title}</h1><p class="state">{state}</p>{summary}
<nav aria-label="sections">{links}</nav></header>
<main>
{sections}
</main>
<footer class="note">Drawn by stillhouse report; the log was last written {written}.</footer>
<script>{script}</script>
</body>
</html>
"""

STYLE = """
:root { --paper: #fff; --ink: #1b1f24; --quiet: #5d6670; --hair: #e3e6ea; --tint: #f5f6f8;
  --c0: #0072b2; --c1: #c44e00; --c2: #00805d; --c3: #a3447a; --c4: #8a6500; --c5: #4b5563;
  --m0: #f2a54a; --m1: #ea7457; --m2: #cc4778; --m3: #9c179e; --m4: #6300a7; --m5: #0d0887;
  --bad: #c02617; }
@media screen and (prefers-color-scheme: dark) {
  :root { --paper: #15181c; --ink: #e6e8eb; --quiet: #9aa4af; --hair: #2d333a; --tint: #1e2329;
    --c0: #56b4e9; --c1: #ff9557; --c2: #35c99c; --c3: #e79ac6; --c4: #e8bd45; --c5: #b3bcc6;
    --m0: #8f3fc0; --m1: #b9479f; --m2: #dd5e7c; --m3: #f48a55; --m4: #fdb92f; --m5: #f3f26a;
    --bad: #ff7a6b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 28px 20px 48px; max-width: 1180px; color: var(--ink);
  background: var(--paper); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
h1 { font-size: 26px; line-height: 1.2; margin: 0; }
h2 { font-size: 18px; margin: 0 0 12px; }
section { margin-top: 28px; padding-top: 20px; border-top: 1px solid var(--hair); }
.note, .state, nav { color: var(--quiet); }
.note { font-size: 13px; font-weight: 400; }
.state { margin: 4px 0 18px; }
.bar { display: block; max-width: 420px; height: 5px; margin-top: 8px; border-radius: 3px;
  background: var(--hair); overflow: hidden; }
.bar i { display: block; height: 100%; background: var(--c0); }
.figures { display: grid; gap: 16px 20px; margin: 0;
  grid-template-columns: repeat(auto-fill, minmax(min(210px, 42%), 1fr)); }
.figures dt { color: var(--quiet); font-size: 13px; }
.figures dd { margin: 0; font-size: 22px; line-height: 1.25; }
.figures dd + dd { color: var(--quiet); font-size: 13px; }
nav { display: flex; flex-wrap: wrap; gap: 4px 18px; margin-top: 20px; font-size: 14px; }
a { color: var(--c0); text-decoration: none; }
a:hover { text-decoration: underline; }
footer { margin-top: 36px; }
.samples img { display: block; max-width: 100%; height: auto; image-rendering: pixelated; }
.samples img[hidden] { display: none; }
.samples p { display: flex; flex-wrap: wrap; align-items: center; margin: 0 0 10px;
  max-width: 560px; }
.samples output { min-width: 13em; }
.samples input { flex: 1 1 240px; margin: 0; accent-color: var(--c0); }
.samples input[hidden] { display: none; }
.samples .note { margin: 8px 0 0; }
#log { margin: 0 4px 0 0; vertical-align: -2px; accent-color: var(--c0); }
#log ~ .charts { margin-top: 14px; }
#log + label { font-size: 13px; color: var(--quiet); }
#log:checked ~ .charts .either > :first-child { display: none; }
#log:not(:checked) ~ .charts .either > :last-child { display: none; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { padding: 4px 16px 4px 0; text-align: left; vertical-align: top; }
th { font-weight: 400; color: var(--quiet); }
.events tr + tr { border-top: 1px solid var(--hair); }
.events td:first-child, .events th:first-child { text-align: right; white-space: nowrap; }
.events td:nth-child(2) { white-space: nowrap; }
.events th:nth-child(-n + 2) { width: 1%; }
.facts th { width: 14em; max-width: 40vw; }
.facts td[colspan] { padding: 0; }
.facts details table { margin: 0 0 6px 7px; border-left: 1px solid var(--hair); }
.facts details th, .facts details summary { padding-left: 12px; }
.facts > table > tbody > tr > td > details > summary { padding-left: 0; font-weight: 600; }
summary { cursor: pointer; padding: 4px 0; }
@media (max-width: 600px) { .samples img { image-rendering: auto; } .facts th { width: 9em; }
  .events tr { display: block; padding: 6px 0; } .events td { display: inline-block; padding: 0; }
  .events td + td { margin-left: 10px; } .events td + td + td { display: block; margin: 0; }
  .events tr:first-child { display: none; } }
@media print { nav, input, #log + label { display: none; }
  body { padding: 0; } figure, .samples, tr { break-inside: avoid; } }
"""

SCRIPT = """
for (const slider of document.querySelectorAll("#moment")) {
  const pictures = [...document.querySelectorAll(".samples img")];
  const told = document.querySelector(".samples output");
  const show = () => {
    pictures.forEach((picture, i) => { picture.hidden = i !== +slider.value; });
    told.textContent = pictures[slider.value].dataset.told;
    slider.setAttribute("aria-valuetext", told.textContent);
  };
  slider.hidden = pictures.length < 2;
  slider.addEventListener("input", show);
  document.addEventListener("keydown", event => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || document.activeElement !== document.body) return;
    slider.value = +slider.value + step;
    show();
  });
  slider.value = pictures.length - 1;  // browsers restore another one on reload
  show();
}
"""
