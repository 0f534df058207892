"""How the report looks: colours for light and dark, type, and what changes on a narrow screen."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --card: #f6f7f9; --line: #d5dae1; --text: #1a1e24; --muted: #545d69;
  --error: #b3261e; --warning: #855300; --note: #1f5da8; --clean: #1b6b3a; --mark: #eceff3;
  --loading: #b45309; --forward: #3b93d9; --backward: #1e3a8a; --collective: #b0239a; --other: #b6bec8;
  --given: #2f6fb5; --several: #c07600; --unseen: #c9362c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --card: #1c2127; --line: #353c45; --text: #e7eaee; --muted: #a6b0bc;
    --error: #ff9389; --warning: #f2b84f; --note: #82bcff; --clean: #72d193; --mark: #2b323b;
    --loading: #f0a63a; --forward: #8cc8ff; --backward: #4a7df0; --collective: #e57ccf; --other: #4d5661;
    --given: #5d9fe6; --several: #f2b84f; --unseen: #ff7a6e;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body {
  margin: 0; background: var(--page); color: var(--text);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1096px; margin: 0 auto; padding: 40px 24px 64px; }
h1, h2, h3, h4, p, ul, pre, figure, dl, dd { margin: 0; }
h1 { font-size: 30px; line-height: 1.25; font-weight: 650; letter-spacing: -0.01em; }
h2 { font-size: 20px; line-height: 1.3; font-weight: 650; }
h3 { font-size: 17px; line-height: 1.4; font-weight: 650; }
h4 { font-size: 13px; line-height: 1.4; font-weight: 650; color: var(--muted); }
code, pre, .place { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
code, .place, .what, .evidence, .ends { overflow-wrap: anywhere; }
section { margin-top: 48px; }
section > * + * { margin-top: 16px; }
.muted { color: var(--muted); }
.small { font-size: 14px; }
.lede { max-width: 72ch; }
.error { --tone: var(--error); } .warning { --tone: var(--warning); }
.note { --tone: var(--note); } .clean { --tone: var(--clean); }

.verdict { border-left: 6px solid var(--tone); padding: 4px 0 4px 20px; }
.verdict h1 { color: var(--tone); text-wrap: balance; }
.verdict .script { margin-bottom: 8px; font-size: 15px; }
.facts { display: flex; flex-wrap: wrap; gap: 4px 20px; margin-top: 10px; padding: 0; list-style: none; }
.facts { color: var(--muted); }

.finding {
  padding: 18px 20px 20px; background: var(--card);
  border: 1px solid var(--line); border-left: 4px solid var(--tone); border-radius: 6px;
}
.finding > * + * { margin-top: 12px; }
.finding header { display: flex; flex-wrap: wrap; align-items: baseline; gap: 2px 12px; }
.severity { color: var(--tone); font-size: 14px; font-weight: 650; }
.place { color: var(--muted); font-size: 14px; margin-left: auto; }
.what { max-width: 76ch; }
.evidence { padding-left: 20px; color: var(--muted); font-size: 15px; }
.finding h4 + * { margin-top: 4px; }

pre {
  background: var(--page); border: 1px solid var(--line); border-radius: 4px; padding: 10px 0;
  font-size: 13.5px; line-height: 1.6; overflow-x: auto; tab-size: 4;
}
pre .row { display: block; width: max-content; min-width: 100%; padding-right: 14px; }
pre .row { border-left: 3px solid transparent; }
pre .row.marked { background: var(--mark); border-left-color: var(--tone); }
pre .number { display: inline-block; width: 5ch; padding-right: 1.5ch; text-align: right; color: var(--muted); }
pre .number { user-select: none; -webkit-user-select: none; }
pre.plain { padding: 10px 14px; }
pre.wraps { white-space: pre-wrap; overflow-wrap: anywhere; }

.chart { display: grid; grid-template-columns: 68px minmax(0, 1fr); }
.chart .names { font-size: 13px; color: var(--muted); font-variant-numeric: tabular-nums; }
.chart .names div { display: flex; align-items: center; white-space: nowrap; }
.scroll { overflow-x: auto; }
svg { display: block; }
svg text { font: 12px/1 system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: var(--muted); }
svg text.waiting { fill: var(--error); font-weight: 600; font-size: 13px; }
.ledger { width: 100%; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; padding: 0; list-style: none; font-size: 14px; }
.legend li { display: flex; align-items: center; gap: 7px; }
.endings { padding: 0; list-style: none; font-size: 15px; }
.endings li { overflow-wrap: anywhere; }
.loading { fill: var(--loading); } .forward { fill: var(--forward); } .backward { fill: var(--backward); }
.collective { fill: var(--collective); } .other { fill: var(--other); } .track { fill: var(--card); }
.given { fill: var(--given); } .several { fill: var(--several); } .unseen { fill: var(--unseen); }
.grid { stroke: var(--line); stroke-width: 1; } .step { stroke: var(--text); stroke-width: 1.5; }
.hatch { stroke: var(--error); stroke-width: 2.5; } .hung { fill: url(#hatch); stroke: var(--error); stroke-width: 1; }
.cross { stroke: var(--error); stroke-width: 2.5; stroke-linecap: round; }

.passes { display: grid; gap: 32px; }
.passes figure > * + * { margin-top: 8px; }
.passes h3 { font-size: 16px; }
.ends { display: flex; justify-content: space-between; gap: 12px; margin-left: 68px; }
.ends { font-size: 13px; color: var(--muted); }
figcaption { font-size: 15px; }

details { border: 1px solid var(--line); border-radius: 6px; background: var(--card); }
details + details { margin-top: 8px; }
summary { cursor: pointer; padding: 10px 16px; font-size: 15px; }
details > :not(summary) { margin: 0 16px 16px; }
.list { padding-left: 20px; }
.list li + li { margin-top: 4px; }
:focus-visible { outline: 2px solid var(--note); outline-offset: 2px; }
@media (max-width: 640px) {
  main { padding: 24px 16px 48px; }
  h1 { font-size: 24px; }
  section { margin-top: 36px; }
  .verdict { padding-left: 14px; }
  .finding { padding: 14px 14px 16px; }
  .place { margin-left: 0; width: 100%; }
  .chart { grid-template-columns: 60px minmax(0, 1fr); }
  .ends { margin-left: 60px; }
}
@media print { .finding, figure { break-inside: avoid; } }
"""
