"use strict";
// Line charts with bands, a legend that switches curves on and off, and values under the pointer.
(() => {
  const charts = JSON.parse(document.getElementById("data").textContent);
  const hidden = new Set();
  const NS = "http://www.w3.org/2000/svg";
  const el = (name, attributes, parent) => {
    const node = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (parent) parent.appendChild(node);
    return node;
  };

  const niceTicks = (low, high, wanted) => {
    if (!(high > low)) return [low];
    const rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= rough);
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
    return ticks;
  };
  const logTicks = (low, high) => {
    const ticks = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
      for (const m of high / low > 1e3 ? [1] : high / low > 20 ? [1, 3] : [1, 2, 3, 5, 7]) {
        const v = m * 10 ** e;
        if (v >= low * .999 && v <= high * 1.001) ticks.push(v);
      }
    return ticks.length > 1 ? ticks : niceTicks(low, high, 4).filter(v => v > 0);
  };
  const short = v => v === 0 ? "0" : Math.abs(v) >= 1e5 || Math.abs(v) < 1e-3 ? v.toExponential(0).replace("e+", "e") : String(+v.toPrecision(4));
  const shown = (chart, v) => chart.percent ? +(100 * v).toFixed(1) + " %" : short(v);

  function draw(chart) {
    const box = document.getElementById("chart-" + chart.name);
    box.textContent = "";
    const curves = chart.curves.filter(c => c.x.length && !hidden.has(c.label));
    const width = Math.max(240, box.clientWidth), height = Math.round(Math.min(300, 130 + width * .35));
    const left = 52, right = 10, top = 10, bottom = 34;
    const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": chart.title }, box);
    if (!curves.length) { el("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, svg).textContent = "all curves are switched off"; return; }
    const positive = v => !chart.log || v > 0;
    const xs = curves.flatMap(c => c.x), ys = curves.flatMap(c => [...c.low, ...c.high]).filter(positive);
    const x0 = Math.min(...xs), x1 = Math.max(...xs) || 1;
    let y0 = Math.min(...ys), y1 = Math.max(...ys);
    const log = chart.log && y0 > 0 && y1 / y0 > 3;
    if (!log) { const room = (y1 - y0 || Math.abs(y1) || 1) * .05; y0 -= room; y1 += room; if (chart.percent) { y0 = Math.max(0, y0); y1 = Math.min(1, y1); } }
    if (y0 === y1) y1 = y0 + 1;
    const f = log ? Math.log : v => v;
    const X = v => left + (v - x0) / (x1 - x0 || 1) * (width - left - right);
    const Y = v => height - bottom - (f(Math.max(v, log ? y0 : v)) - f(y0)) / (f(y1) - f(y0)) * (height - top - bottom);

    for (const v of log ? logTicks(y0, y1) : niceTicks(y0, y1, 5)) {
      el("line", { class: "grid", x1: left, x2: width - right, y1: Y(v), y2: Y(v) }, svg);
      el("text", { x: left - 6, y: Y(v) + 4, "text-anchor": "end" }, svg).textContent = shown(chart, v);
    }
    for (const v of niceTicks(x0, x1, Math.max(3, Math.floor(width / 75))))
      el("text", { x: X(v), y: height - bottom + 15, "text-anchor": "middle" }, svg).textContent = short(v);
    el("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, svg).textContent = chart.x_label;

    for (const c of curves) {
      const path = values => c.x.map((x, i) => `${X(x).toFixed(1)},${Y(values[i]).toFixed(1)}`);
      el("polygon", { points: [...path(c.low), ...path(c.high).reverse()].join(" "), fill: c.colour, opacity: .15 }, svg);
      el("polyline", { points: path(c.mean).join(" "), fill: "none", stroke: c.colour, "stroke-width": 1.7, "stroke-linejoin": "round" }, svg);
    }
    hover(chart, box, svg, curves, { X, x0, x1, left, right, top, bottom, width, height });
  }

  function hover(chart, box, svg, curves, g) {
    const cursor = el("line", { class: "cursor", y1: g.top, y2: g.height - g.bottom, visibility: "hidden" }, svg);
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    box.appendChild(tip);
    const leave = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); };
    const move = event => {
      const scale = g.width / svg.getBoundingClientRect().width;
      const px = (event.clientX - svg.getBoundingClientRect().left) * scale;
      if (px < g.left - 4 || px > g.width - g.right + 4) return leave();
      const x = g.x0 + (px - g.left) / (g.width - g.left - g.right) * (g.x1 - g.x0);
      const rows = curves.filter(c => x <= c.x[c.x.length - 1] * 1.0001 + 1e-9).map(c => {
        const i = c.x.reduce((best, v, j) => Math.abs(v - x) < Math.abs(c.x[best] - x) ? j : best, 0);
        return { c, i };
      }).sort((a, b) => b.c.mean[b.i] - a.c.mean[a.i]);
      if (!rows.length) return leave();
      tip.textContent = "";
      const head = document.createElement("strong");
      head.textContent = `${chart.x_label} ${short(rows[0].c.x[rows[0].i])}`;
      tip.appendChild(head);
      for (const { c, i } of rows) {
        const line = document.createElement("div"), dot = document.createElement("i");
        dot.style.background = c.colour;
        line.append(dot, `${c.label}: ${shown(chart, c.mean[i])}`);
        if (c.low[i] !== c.high[i]) line.append(` (${shown(chart, c.low[i])} to ${shown(chart, c.high[i])})`);
        tip.appendChild(line);
      }
      tip.hidden = false;
      const at = g.X(rows[0].c.x[rows[0].i]);
      cursor.setAttribute("x1", at);
      cursor.setAttribute("x2", at);
      cursor.setAttribute("visibility", "visible");
      const room = box.clientWidth - tip.offsetWidth;
      tip.style.left = Math.max(0, Math.min(room, at / scale < box.clientWidth / 2 ? at / scale + 12 : at / scale - tip.offsetWidth - 12)) + "px";
      tip.style.top = g.top + "px";
    };
    svg.addEventListener("pointermove", move);
    svg.addEventListener("pointerdown", move);
    svg.addEventListener("pointerleave", leave);
  }

  const drawAll = () => charts.forEach(draw);
  const labels = new Map(charts.flatMap(chart => chart.curves.map(c => [c.label, c.colour])));
  for (const [label, colour] of labels) {
    const button = document.createElement("button"), mark = document.createElement("i");
    mark.style.background = colour;
    button.append(mark, label);
    button.type = "button";
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", () => {
      const off = hidden.has(label);
      off ? hidden.delete(label) : hidden.add(label);
      button.setAttribute("aria-pressed", String(off));
      drawAll();
    });
    document.getElementById("legend").appendChild(button);
  }
  drawAll();
  let pending;
  addEventListener("resize", () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(drawAll); });
})();
