"""The style sheet of a plan's page: colours for light and dark screens, letters, tables, and rules for paper.

Colours of passes are those of Okabe and Ito, which colour-blind people can distinguish. Kinds of memory that belong
together have shades of one colour: blue for training state, orange for activations and temporary tensors.
"""

LIGHT = """
--ground: #fafaf8; --card: #ffffff; --ink: #1c2126; --soft: #59626c; --line: #e1e4e6; --grid: #d8dcdf;
--idle: #eceeef; --limit: #b3261e; --good: #1b6e4b; --edge: #ffffff;
--parameters: #1d4f7c; --gradients: #3d84bd; --optimizer: #86b9df; --buckets: #c3ddf0;
--activations: #e69f00; --temporary: #f3cf80; --messages: #cc79a7; --reserved: #9aa1a8;
--F: #56a0d3; --B: #2a9d78; --I: #e69f00; --W: #cc79a7; --E: #7d858d; --kernels: #3d84bd; --wait: #cc79a7;
--product: #0072b2; --forward: #d55e00; --backward: #2a9d78; --elementwise: #cc79a7;
"""
DARK = """
--ground: #14171a; --card: #1c2024; --ink: #e7e9eb; --soft: #9ea7b0; --line: #31373d; --grid: #363c42;
--idle: #262b30; --limit: #ff7b72; --good: #5fcf9f; --edge: #14171a;
--parameters: #2f6ea6; --gradients: #5499cf; --optimizer: #93c3e6; --buckets: #cfe5f5; --reserved: #717981;
--E: #8d959d; --product: #3f9fdc; --forward: #f0813a; --backward: #3dbb92;
"""
# Classes of shapes that have the colour of the same name.
FILLED = (
    *("parameters", "gradients", "optimizer", "buckets", "activations", "temporary", "messages", "reserved"),
    *("F", "B", "I", "W", "E", "idle", "kernels", "wait", "product", "forward", "backward", "elementwise"),
)

RULES = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
 Roboto, "Helvetica Neue", Arial, sans-serif; font-variant-numeric: tabular-nums; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 26px; line-height: 1.25; font-weight: 650; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 19px; font-weight: 650; margin: 0 0 8px; }
h3 { font-size: 15px; font-weight: 600; margin: 28px 0 8px; }
p { margin: 0 0 12px; max-width: 60em; color: var(--soft); }
section { margin-top: 52px; }
dt { font-weight: 600; }
dd { margin: 0 0 14px; color: var(--soft); max-width: 60em; }
code { font: 0.92em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }

.verdict { font-size: 17px; font-weight: 600; margin-bottom: 22px; }
.verdict::before { display: inline-block; width: 1.3em; }
.fits { color: var(--good); }
.fits::before { content: "✓"; }
.exceeds { color: var(--limit); }
.exceeds::before { content: "✗"; }
.cards { display: grid; grid-template-columns: repeat(4, 1fr); gap: 14px; margin-bottom: 22px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 18px 16px; }
.card .name, .card .more { color: var(--soft); font-size: 13px; }
.card .value { font-size: 27px; line-height: 1.35; font-weight: 600; white-space: nowrap; }
.layout { margin-bottom: 2px; max-width: none; }
.note { border-left: 3px solid var(--limit); padding: 2px 0 2px 12px; color: var(--ink); }

.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 20px; margin: 0 0 14px; padding: 0; }
.legend li { font-size: 13px; }
.legend svg { display: inline-block; margin-right: 7px; vertical-align: -1px; }
.legend rect { rx: 2px; }
.bar + .legend { margin-top: 10px; }

.flow { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th { text-align: left; font-weight: 600; color: var(--soft); padding: 6px 14px 6px 0; white-space: nowrap; }
thead th { border-bottom: 1px solid var(--line); font-size: 0.92em; }
td { padding: 6px 14px 6px 0; white-space: nowrap; border-bottom: 1px solid var(--line); }
.n { text-align: right; }
.unit { display: inline-block; width: 3.7em; text-align: left; padding-left: 0.35em; color: var(--soft); }
th.quantity { padding-right: calc(3.7em + 18px); }
details { margin-top: 14px; }
summary { cursor: pointer; color: var(--soft); font-size: 13px; margin-bottom: 6px; }
.bars td, .bars th { border: 0; padding-top: 0; padding-bottom: 0; line-height: 1; font-weight: 400; }
.bars td:nth-child(2) { width: 100%; padding-right: 10px; }
.bars td:last-child { padding-right: 0; }
.bars .fullest { font-weight: 700; color: var(--ink); }
.thin { font-size: 11.5px; }

svg { display: block; }
svg text { fill: var(--soft); font-size: 12px; }
line.limit { stroke: var(--limit); stroke-width: 2; }
text.limit { fill: var(--limit); font-weight: 600; }
.grid { stroke: var(--grid); }
.time { display: flex; margin-top: 10px; }
.time .flow { flex: 1; }
.names { flex: none; }
.track { min-width: 640px; }
.track rect { stroke: var(--edge); stroke-width: 0.4; }
.track .numbers text { fill: #0d1b26; text-anchor: middle; font-size: inherit; }
.zoom input { margin: 0 7px 0 0; vertical-align: middle; }
.zoom label { font-size: 13px; vertical-align: middle; }
.large { display: none; }
.figures { display: grid; grid-template-columns: 1fr 1fr; gap: 24px; }
figure { margin: 0; overflow-x: auto; }
figcaption { font-size: 13px; font-weight: 600; }
.roofline { width: 100%; min-width: 400px; }
.roofline circle { fill-opacity: 0.72; stroke: var(--edge); }
.roofline .number { fill: #ffffff; font-weight: 600; font-size: 11px; }
.roof { fill: none; stroke: var(--ink); stroke-width: 1.6; }
.dotted { stroke: var(--soft); stroke-dasharray: 2 4; }

@media screen {
 #enlarge:checked ~ .time .track { width: var(--wide); }
 #enlarge:checked ~ .time .large { display: inline; }
 #enlarge:checked ~ .time .small { display: none; }
}
@media screen and (max-width: 760px) {
 main { padding: 24px 16px 48px; }
 h1 { font-size: 21px; }
 .cards { grid-template-columns: 1fr 1fr; gap: 10px; }
 .card { padding: 10px 12px; }
 .card .value { font-size: 21px; }
 .figures { grid-template-columns: 1fr; }
 .axis .tick { display: none; }
}
@media print {
 body { background: none; font-size: 12px; }
 main { max-width: none; padding: 0; }
 section { margin-top: 26px; }
 table { font-size: 10px; }
 .axis text, .track text, .names text, .track .numbers text { font-size: 8px; }
 .card { padding: 8px 10px; }
 .card .value { font-size: 19px; }
 .zoom input, .zoom label, details { display: none; }
 .flow, figure { overflow: visible; }
 .roofline, .track { min-width: 0; }
 figure, .cards, .time, tr { break-inside: avoid; }
 h2, h3 { break-after: avoid; }
}
"""


def style_sheet() -> str:
    """The rules with their colours. Paper gets those of light screens."""
    fills = "".join(f".{name} {{ fill: var(--{name}); }}\n" for name in FILLED)
    on_dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{{DARK}}} }}"
    return f":root {{ color-scheme: light dark;{LIGHT}}}\n{on_dark}{RULES}{fills}"
