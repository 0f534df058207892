"use strict";
// Line charts as SVG. Dragging zooms all charts to the same steps; the values under the pointer are in the legend.
(() => {
  const W = 480, H = 200, LEFT = 52, RIGHT = 10, TOP = 10, BOTTOM = 22;
  const make = (name, attributes, parent) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    if (parent) parent.append(element);
    return element;
  };
  const html = (name, className, parent, text) => {
    const element = document.createElement(name);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  };
  const show = (v) => v === 0 ? "0" : Math.abs(v) >= 1e5 || Math.abs(v) < 1e-3 ? v.toExponential(2) : String(+v.toPrecision(4));
  const ticks = (low, high, count) => {
    const span = high - low || Math.abs(high) || 1, rough = span / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((f) => f * power >= rough) * power, found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * span; i++) found.push(+(i * step).toPrecision(12));
    return found;
  };
  const charts = [];
  let zoom = null; // the steps that all charts show, or null for all

  class Chart {
    constructor(spec, parent) {
      this.spec = spec;
      this.log = false;
      this.box = html("figure", "chart", parent);
      const head = html("header", "", this.box);
      html("span", "", head, spec.title);
      const values = spec.lines.flatMap((line) => line.points.map((p) => p[1]));
      if (Math.min(...values) > 0) {
        const button = html("button", "", head, "log");
        button.setAttribute("aria-pressed", "false");
        button.onclick = () => { this.log = !this.log; button.setAttribute("aria-pressed", String(this.log)); this.draw(); };
      }
      this.svg = make("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img", "aria-label": spec.title }, this.box);
      this.keys = html("div", "keys", this.box);
      this.listen();
    }
    color(line) { return `var(--r${(line.run * (this.several ? 1 : 0) + (this.several ? 0 : line.validation ? 1 : 0)) % 6})`; }
    get several() { return new Set(this.spec.lines.map((line) => line.run)).size > 1; }
    range() {
      const steps = this.spec.lines.flatMap((line) => line.points.map((p) => p[0]));
      return zoom || [Math.min(...steps), Math.max(...steps)];
    }
    draw() {
      this.svg.replaceChildren();
      const width = this.svg.clientWidth || W;
      this.svg.setAttribute("viewBox", `0 0 ${width} ${H}`);
      const [first, last] = this.range(), lines = this.spec.lines;
      const shown = lines.flatMap((line) => line.points.filter((p) => p[0] >= first && p[0] <= last).map((p) => p[1]));
      const f = this.log ? Math.log10 : (v) => v;
      let low = Math.min(...shown.map(f)), high = Math.max(...shown.map(f));
      if (!(high > low)) { low = (low || 0) - 0.5; high = low + 1; }
      const pad = (high - low) * 0.05;
      low -= pad; high += pad;
      this.x = (step) => LEFT + (width - LEFT - RIGHT) * (last > first ? (step - first) / (last - first) : 0.5);
      this.step = (x) => first + (last - first) * (x - LEFT) / (width - LEFT - RIGHT);
      this.y = (value) => TOP + (H - TOP - BOTTOM) * (1 - (f(value) - low) / (high - low));
      for (const tick of ticks(low, high, 4)) {
        const value = this.log ? 10 ** tick : tick, y = this.y(value);
        make("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }, this.svg);
        make("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, this.svg).textContent = show(value);
      }
      for (const tick of ticks(first, last, Math.max(2, Math.floor(width / 110)))) {
        make("text", { x: this.x(tick), y: H - 6, "text-anchor": "middle" }, this.svg).textContent = tick.toLocaleString("en");
      }
      const clip = `clip-${charts.indexOf(this)}`;
      make("rect", { x: LEFT, y: 0, width: Math.max(0, width - LEFT - RIGHT), height: H }, make("clipPath", { id: clip }, make("defs", {}, this.svg)));
      for (const line of lines) {
        const d = line.points.map((p, i) => `${i ? "L" : "M"}${this.x(p[0]).toFixed(1)} ${this.y(p[1]).toFixed(1)}`).join("");
        const path = make("path", { d, fill: "none", "stroke-width": 1.6, "clip-path": `url(#${clip})` }, this.svg);
        path.style.stroke = this.color(line);
        if (line.validation && this.several) path.setAttribute("stroke-dasharray", "5 3");
        if (line.points.length < 30) for (const p of line.points) {
          make("circle", { cx: this.x(p[0]), cy: this.y(p[1]), r: 2.4, "clip-path": `url(#${clip})` }, this.svg).style.fill = this.color(line);
        }
      }
      this.cursor = make("line", { class: "cursor", y1: TOP, y2: H - BOTTOM, visibility: "hidden" }, this.svg);
      this.select = make("rect", { class: "select", y: TOP, height: H - TOP - BOTTOM, visibility: "hidden" }, this.svg);
      this.legend(null);
    }
    legend(step) {
      this.keys.replaceChildren();
      for (const line of this.spec.lines) {
        let text = this.spec.lines.length > 1 || line.label !== "training" ? line.label : "";
        if (step !== null) {
          const near = line.points.reduce((a, b) => Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a);
          text = `${text} ${show(near[1])} at ${near[0].toLocaleString("en")}`.trim();
        }
        if (!text) continue;
        const key = html("span", line.validation && this.several ? "validation" : "", this.keys, text);
        key.style.setProperty("--c", this.color(line));
      }
    }
    listen() {
      const at = (event) => event.clientX - this.svg.getBoundingClientRect().left;
      let from = null;
      this.svg.addEventListener("pointerdown", (event) => { from = at(event); this.svg.setPointerCapture(event.pointerId); });
      this.svg.addEventListener("pointermove", (event) => {
        const x = at(event);
        for (const name of ["x1", "x2"]) this.cursor.setAttribute(name, x);
        this.cursor.setAttribute("visibility", "visible");
        this.legend(this.step(x));
        if (from !== null && Math.abs(x - from) > 4) {
          this.select.setAttribute("x", Math.min(x, from));
          this.select.setAttribute("width", Math.abs(x - from));
          this.select.setAttribute("visibility", "visible");
        }
      });
      this.svg.addEventListener("pointerup", (event) => {
        const x = at(event);
        if (from !== null && Math.abs(x - from) > 8) { zoom = [this.step(Math.min(x, from)), this.step(Math.max(x, from))]; charts.forEach((chart) => chart.draw()); }
        from = null;
        this.select.setAttribute("visibility", "hidden");
      });
      this.svg.addEventListener("pointerleave", () => { this.cursor.setAttribute("visibility", "hidden"); this.legend(null); });
      this.svg.addEventListener("dblclick", () => { zoom = null; charts.forEach((chart) => chart.draw()); });
    }
  }
  const parent = document.getElementById("charts");
  for (const spec of JSON.parse(document.getElementById("data").textContent)) charts.push(new Chart(spec, parent));
  const redraw = () => charts.forEach((chart) => chart.draw());
  redraw();
  addEventListener("resize", redraw);
})();
