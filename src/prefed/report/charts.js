"use strict";
// The charts of a page (drawn by uPlot), its controls, tables that sort, and news of runs under way.
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const byId = id => document.getElementById(id);
  const make = (name, parent, text = "", attributes = {}) => {
    const node = parent.appendChild(document.createElement(name));
    node.textContent = text;
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };
  let charts = page.charts;
  const hidden = new Set();
  const plots = new Map(); // by the name of the chart
  const ink = name => getComputedStyle(document.documentElement).getPropertyValue(name);
  const short = v => v === 0 ? "0" : Math.abs(v) >= 1e5 || Math.abs(v) < 1e-3 ? v.toExponential(1).replace(".0e", "e").replace("e+", "e") : String(+v.toPrecision(4));
  const shown = (chart, v) => chart.percent ? +(100 * v).toFixed(1) + " %" : short(v);

  // ---------------------------------------------------------------- what a chart shows

  // A moving average whose first values are not pulled towards zero.
  function smooth(values) {
    const keep = +byId("smoothing").value;
    let sum = 0, weight = 0;
    return keep === 0 ? values : values.map(v => {
      if (v === null) return null;
      sum = keep * sum + (1 - keep) * v;
      weight = keep * weight + (1 - keep);
      return sum / weight;
    });
  }

  function isLog(chart, curves) {
    const asked = byId("y-axis").value;
    if (asked || !chart.log) return asked === "log";
    const values = curves.flatMap(c => c.low.length ? [...c.low, ...c.high] : c.mean);
    return Math.min(...values) > 0 && Math.max(...values) / Math.min(...values) > 3;
  }

  function prepare(chart) {
    const curves = chart.curves.filter(c => c.x.length && !hidden.has(c.label));
    const log = isLog(chart, curves), logX = byId("x-axis").value === "log";
    const series = [{}], bands = [], tables = [];
    for (const c of curves) {
      const there = c.x.map((x, i) => i).filter(i => !logX || c.x[i] > 0);
      const line = values => smooth(there.map(i => values[i] ?? null)).map(v => v === null || (log && v <= 0) ? null : v);
      const table = [there.map(i => c.x[i])];
      const add = (values, style) => { table.push(line(values)); series.push({ label: c.label, ...style }); };
      const paths = chart.steps ? uPlot.paths.stepped({ align: 0 }) : undefined;
      const few = c.x.length < 3, dash = [[], [8, 4], [8, 3, 2, 3], [2, 3]][c.dash % 4];
      add(c.mean, { stroke: c.colour, width: 1.7, dash, paths, spanGaps: true, points: { show: few }, curve: c, range: { x: table[0], low: line(c.low), high: line(c.high) } });
      if (byId("bands").checked && c.low.length) {
        const edge = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
        add(c.high, edge);
        add(c.low, edge);
        bands.push({ series: [series.length - 2, series.length - 1], fill: c.colour + "26" });
      }
      if (byId("seeds").checked)
        for (const values of c.seeds) add(values, { stroke: c.colour + "99", width: .8, points: { show: few }, spanGaps: true });
      tables.push(table);
    }
    return { log, logX, series, bands, data: tables.length ? uPlot.join(tables) : null };
  }

  // ---------------------------------------------------------------- drawing

  const size = box => ({ width: Math.max(220, box.clientWidth), height: Math.round(Math.min(300, 130 + box.clientWidth * .35)) });

  function options(chart, box, p) {
    const axis = { stroke: ink("--faint"), font: "11px system-ui, sans-serif", grid: { stroke: ink("--line"), width: 1 }, ticks: { stroke: ink("--line"), width: 1, size: 4 } };
    const whole = (u, low, high) => {
      if (u.zoomed || low === null) return [low, high];
      const digit = (v, round) => { const e = 10 ** Math.floor(Math.log10(v)); return round(v / e) * e; };
      if (p.log) return [digit(low / 1.02, Math.floor), digit(high * 1.02, Math.ceil)];
      const room = (high - low || Math.abs(high) || 1) * .05;
      return chart.percent ? [Math.max(0, low - room), Math.min(1, high + room)] : [chart.steps ? 0 : low - room, high + room];
    };
    // On a log axis the first line may be anywhere: only round numbers have room for a label.
    const labelled = (log, text) => (u, ticks) => ticks.map(v => v === null || (log && +v.toPrecision(1) !== +v.toPrecision(6)) ? "" : text(v));
    return {
      ...size(box), series: p.series, bands: p.bands, legend: { show: false },
      scales: { x: { time: false, distr: p.logX ? 3 : 1, ...(p.logX && { range: (u, low, high) => [low, high] }) }, y: { distr: p.log ? 3 : 1, range: whole } },
      axes: [
        { ...axis, label: chart.x_label, labelFont: axis.font, labelSize: 18, size: 28, values: labelled(p.logX, short) },
        { ...axis, label: chart.y_label, labelFont: axis.font, labelSize: 16, size: 54, values: labelled(p.log, v => shown(chart, v)) },
      ],
      cursor: {
        drag: { x: true, y: true, uni: 20 }, points: { size: 6 },
        bind: { dblclick: (u, target, handle) => event => { u.zoomed = false; handle(event); } },
      },
      hooks: {
        setSelect: [u => { if (u.select.width > 0 || u.select.height > 0) u.zoomed = true; }],
        setCursor: [u => hover(chart, box, u)],
      },
    };
  }

  function draw(chart) {
    const box = byId("chart-" + chart.name), before = plots.get(chart.name), p = prepare(chart);
    const drawn = JSON.stringify([p.log, p.logX, p.bands.length, p.series.map(s => [s.label, s.width, s.stroke, s.points?.show]), ink("--line")]);
    if (before && before.drawn === drawn) {
      before.series.forEach((s, i) => Object.assign(s, { curve: p.series[i].curve, range: p.series[i].range }));
      before.setData(p.data, !before.zoomed);
      if (before.zoomed) before.redraw();
      return;
    }
    const scales = before?.zoomed && p.data && ["x", "y"].map(k => [k, before.scales[k].min, before.scales[k].max]);
    before?.destroy();
    plots.delete(chart.name);
    box.textContent = p.data ? "" : "all curves are switched off";
    if (!p.data) return;
    const plot = new uPlot(options(chart, box, p), p.data, box);
    plot.drawn = drawn;
    plot.tip = make("div", box, "", { class: "tip", hidden: "" });
    box.plot = plot;
    plots.set(chart.name, plot);
    if (scales) {
      plot.zoomed = true;
      for (const [key, min, max] of scales) plot.setScale(key, { min, max });
    }
  }

  function hover(chart, box, u) {
    if (!u.tip) return;
    const at = u.cursor.idx;
    u.tip.hidden = at === null || u.cursor.left < 0;
    if (u.tip.hidden) return;
    const near = (values, last) => { // the lines of others may have points where this one has none
      for (let d = 0; d < values.length; d++)
        for (const i of [at - d, at + d]) if (i >= 0 && i <= last && values[i] !== undefined && values[i] !== null) return i;
      return -1;
    };
    const rows = [];
    u.series.forEach((s, i) => {
      if (!s.curve || u.data[0][at] > s.curve.x[s.curve.x.length - 1] * 1.0001 + 1e-9) return;
      const j = near(u.data[i], u.data[0].length - 1);
      const k = j < 0 || !s.curve.low.length ? -1 : s.range.x.indexOf(u.data[0][j]);
      if (j >= 0) rows.push({ c: s.curve, value: u.data[i][j], low: s.range.low[k], high: s.range.high[k] });
    });
    rows.sort((a, b) => b.value - a.value);
    u.tip.textContent = "";
    make("strong", u.tip, `${chart.x_label} ${short(u.data[0][at])}`);
    for (const { c, value, low, high } of rows) {
      const line = make("div", u.tip);
      make("i", line).style.background = c.colour;
      const range = low != null && low !== high ? ` (${shown(chart, low)} to ${shown(chart, high)})` : "";
      line.append(`${c.label}: ${shown(chart, value)}${range}`);
    }
    const x = u.over.offsetLeft + u.cursor.left, room = box.clientWidth - u.tip.offsetWidth;
    u.tip.style.left = Math.max(0, Math.min(room, x < box.clientWidth / 2 ? x + 12 : x - u.tip.offsetWidth - 12)) + "px";
    u.tip.style.top = "6px";
  }

  // ---------------------------------------------------------------- the page

  function lay() { // places for the charts, and a switch for each label
    const splits = new Set(charts.map(chart => chart.split));
    for (const chart of charts) {
      if (byId("chart-" + chart.name)) continue;
      const heading = splits.size > 1 ? `${chart.kind}: ${chart.split}` : chart.kind;
      const id = "charts-" + heading.toLowerCase().replace(/\W+/g, "-");
      if (!byId(id)) {
        make("h3", byId("charts"), heading);
        make("div", byId("charts"), "", { id, class: "charts" });
      }
      const figure = make("figure", byId(id));
      make("figcaption", figure, chart.title);
      const box = make("div", figure, "", { class: "chart", id: "chart-" + chart.name, role: "img", "aria-label": chart.title });
      new ResizeObserver(() => { const plot = plots.get(chart.name); if (plot && plot.width !== size(box).width) plot.setSize(size(box)); }).observe(box);
    }
    const colours = new Map(charts.flatMap(chart => chart.curves.map(c => [c.label, c.colour])));
    const there = new Map([...byId("legend").children].map(button => [button.textContent, button]));
    for (const [label, colour] of colours) {
      const button = there.get(label) ?? make("button", byId("legend"), "", { type: "button", "aria-pressed": "true" });
      if (!there.has(label)) {
        make("i", button);
        button.append(label);
        button.addEventListener("click", () => {
          hidden.delete(label) || hidden.add(label);
          button.setAttribute("aria-pressed", String(!hidden.has(label)));
          drawAll();
        });
      }
      button.firstChild.style.background = colour;
    }
  }

  const drawAll = () => { lay(); charts.forEach(draw); };

  for (const id of ["smoothing", "seeds", "bands", "x-axis", "y-axis"])
    byId(id).addEventListener("input", () => { if (id.endsWith("axis")) unzoom(); drawAll(); });
  const unzoom = () => { for (const plot of plots.values()) { plot.zoomed = false; plot.setData(plot.data, true); } };
  byId("whole").addEventListener("click", unzoom);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);

  // Tables: a heading that is clicked sorts by its column, once more turns the order round.
  const sorted = new Map(); // of tables that were sorted, by their place: column and direction
  function sort(place, column, direction) {
    const table = byId("tables").querySelectorAll("table")[place];
    if (!table) return;
    const value = row => row.cells[column].textContent.trim();
    const number = text => /^[-+]?[\d.]/.test(text) ? parseFloat(text) : NaN;
    const compare = (a, b) => {
      const [p, q] = [number(a), number(b)];
      if (isNaN(p) !== isNaN(q)) return isNaN(p) ? 1 : -1; // what has no value comes last
      return direction * (isNaN(p) ? a.localeCompare(b) : p - q);
    };
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort((a, b) => compare(value(a), value(b))));
    [...table.tHead.rows[0].cells].forEach((cell, i) => i === column ? cell.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending") : cell.removeAttribute("aria-sort"));
    sorted.set(place, [column, direction]);
  }
  const onHeading = event => {
    const heading = event.target.closest("thead th"), table = heading?.closest("table");
    if (!heading || (event.type === "keydown" && event.key !== "Enter")) return;
    const place = [...byId("tables").querySelectorAll("table")].indexOf(table);
    sort(place, heading.cellIndex, heading.getAttribute("aria-sort") === "descending" ? 1 : heading.getAttribute("aria-sort") === "ascending" ? -1 : heading.cellIndex ? -1 : 1);
  };
  byId("tables").addEventListener("click", onHeading);
  byId("tables").addEventListener("keydown", onHeading);

  drawAll();

  // ---------------------------------------------------------------- runs under way

  let number = -1, timer;
  async function ask() {
    clearTimeout(timer);
    if (document.hidden) return; // nobody looks: the runs have the machine to themselves
    let wait = 3000;
    try {
      const news = await (await fetch(`data?seen=${number}`)).json();
      wait = news.wait;
      byId("status").textContent = news.text;
      byId("status").dataset.state = news.state;
      if (news.number !== number) {
        number = news.number;
        charts = news.charts;
        const open = byId("tables").querySelector("details")?.open;
        byId("tables").innerHTML = news.tables; // escaped where it was made
        if (open !== undefined) byId("tables").querySelector("details").open = open;
        for (const [place, how] of sorted) sort(place, ...how);
        drawAll();
      }
    } catch {
      byId("status").textContent = "prefed watch has ended: this page shows what it saw last.";
      byId("status").dataset.state = "gone";
    }
    timer = setTimeout(ask, wait);
  }
  if (page.live) {
    document.addEventListener("visibilitychange", ask);
    ask();
  }
})();
