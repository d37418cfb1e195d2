// Draws charts with uPlot: lines over steps, time or values, and histograms. Legends are text of our own.

import { h, replace, withUnit, clock, decimals, number } from "./dom.js";

const HEIGHT = 190;
const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3], [1, 2], [12, 4]];
export const COLOURS = 8;
const FROM_ZERO = ["share", "tokens", "tokens/s", "s", "MB", "GB", "W", "versions"]; // units whose axis begins at 0
const WHOLE_STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 1e4, 1e5];
const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, ...[1, 2, 5, 10, 20, 50, 100].map((days) => 86400 * days)];

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// The lines of all runs. With one run each line has its colour; with several each run has its colour, each line its dash.
export function strokes(parts) {
  const several = parts.length > 1;
  const labels = [...new Set(parts.flatMap((part) => part.lines.map((line) => line.label)))];
  return parts.flatMap((part) =>
    part.lines.filter((line) => !(several && line.faint)).map((line) => {
      const at = labels.indexOf(line.label);
      return {
        ...line,
        label: several ? (labels.length > 1 ? `${part.run} · ${line.label}` : part.run) : line.label,
        colour: several ? part.colour : at % COLOURS,
        dash: several ? DASHES[at % DASHES.length] : DASHES[Math.floor(at / COLOURS) % DASHES.length],
      };
    }),
  );
}

// The labels of an axis, with the digits that tell its ticks, a step apart, from one another.
function labels(ticks, step, unit) {
  const values = ticks.map((value) => (Math.abs(value) < step * 1e-6 ? 0 : value));
  const top = Math.max(...values.map(Math.abs));
  const places = decimals(step);
  if (unit === "share") return values.map((value) => `${(100 * value).toFixed(Math.max(0, places - 2))}%`);
  if (top >= 1e5 || (top > 0 && top < 1e-3)) {
    return values.map((value) => (value === 0 ? "0" : value.toExponential(Math.max(0, places + Math.floor(Math.log10(Math.abs(value) * (1 + 1e-9)))))));
  }
  return values.map((value) => number(value, Math.max(0, places)));
}

function axes(kind, unit) {
  const font = `11px ${css("--font")}`;
  const common = { stroke: css("--muted"), font, grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--grid"), width: 1, size: 4 } };
  const x = kind === "time" ? { incrs: TIMES, values: (_, values, axis, space, step) => values.map((value) => clock(value, step)) } : { values: (_, values, axis, space, step) => labels(values, step, kind) };
  return [
    { ...common, size: 28, space: 56, ...x },
    { ...common, size: 52, space: 32, values: (_, values, axis, space, step) => labels(values, step, unit) },
  ];
}

function yRange(unit, isHistogram) {
  return (_, low, high) => {
    if (low === null || low === undefined) return [0, 1];
    if (isHistogram || FROM_ZERO.includes(unit)) {
      const top = unit === "share" && high > 0.5 && high <= 1 ? 1 : high * 1.08 || 1;
      return [Math.min(0, low), top];
    }
    const pad = (high - low || Math.abs(high) || 1) * 0.08;
    return [low - pad, high + pad];
  };
}

export class LineChart {
  constructor(element) {
    this.element = element;
    this.legend = h("ul", { class: "legend" });
    this.place = h("div", { class: "plot" });
    element.append(this.place, this.legend);
    this.plot = null;
    this.chart = null;
    new ResizeObserver(() => this.resize()).observe(this.place);
  }

  draw(chart) {
    this.chart = chart;
    const lines = chart.lines;
    // Runs and lines have different steps, which are joined into one column.
    const tables = lines.map((line) => [line.x, line.y, ...(line.low ? [line.low, line.high] : [])]);
    if (chart.x === "value") tables.push([[0, 1], [0, 1]]);
    const data = window.uPlot.join(tables);
    const shape = `${lines.map((line) => [line.label, line.colour, Boolean(line.low)]).join()}|${chart.x}|${chart.unit}`;
    if (this.plot && shape === this.shape) {
      this.plot.setData(data);
    } else {
      this.shape = shape;
      this.build(data);
    }
    this.drawLegend(null);
  }

  build(data) {
    this.plot?.destroy();
    const { lines, x, unit } = this.chart;
    const series = [{}];
    const bands = [];
    this.columns = [];
    for (const line of lines) {
      const stroke = css(`--c${line.colour}`);
      this.columns.push(series.length);
      const points = { show: line.x.length < 40 && !line.faint, size: 5, width: 1, fill: stroke };
      series.push({ stroke: line.faint ? `${stroke}59` : stroke, width: line.faint ? 0.8 : 1.6, dash: line.dash, spanGaps: true, points });
      if (line.low) {
        for (let side = 0; side < 2; side += 1) series.push({ stroke: "transparent", width: 0, spanGaps: true, points: { show: false } });
        bands.push({ series: [series.length - 1, series.length - 2], fill: `${stroke}2e` });
      }
    }
    // The diagonal of a calibration chart.
    if (x === "value") series.push({ stroke: css("--muted"), width: 1, dash: [4, 4], spanGaps: true, points: { show: false } });
    const options = {
      width: Math.max(this.place.clientWidth, 120),
      height: HEIGHT,
      padding: [8, 10, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { size: 6 }, sync: { key: x, setSeries: false } },
      scales: { x: { time: false, ...(x === "value" ? { range: [0, 1] } : {}) }, y: x === "value" ? { range: [0, 1] } : { range: yRange(unit, false) } },
      axes: axes(x, unit),
      series,
      bands,
      hooks: { setCursor: [(plot) => this.drawLegend(plot.cursor.idx)], draw: [(plot) => this.drawChanges(plot)] },
    };
    this.plot = new window.uPlot(options, data, this.place);
  }

  // Marks the steps after which the configuration changed.
  drawChanges(plot) {
    for (const old of plot.over.querySelectorAll(".change")) old.remove();
    const { min, max } = plot.scales.x;
    for (const { step, words, colour } of this.chart.changes ?? []) {
      if (step < min || step > max) continue;
      const mark = h("div", { class: `change c${colour}`, title: `after step ${number(step)}: ${words}` });
      mark.style.left = `${plot.valToPos(step, "x")}px`;
      plot.over.append(mark);
    }
  }

  drawLegend(at) {
    if (!this.plot) return;
    const { lines, unit, x } = this.chart;
    const hasCursor = at !== null && at !== undefined;
    const items = lines.flatMap((line, i) => {
      if (line.faint) return [];
      const column = this.plot.data[this.columns[i]];
      const value = hasCursor ? column[at] : line.y.at(-1);
      return h("li", {}, h("span", { class: `key c${line.colour}${line.dash.length ? " dashed" : ""}` }), h("span", { class: "label" }, line.label), h("b", {}, withUnit(value, unit)));
    });
    if (hasCursor) {
      const value = this.plot.data[0][at];
      items.unshift(h("li", { class: "at" }, `${x} ${x === "time" ? clock(value) : number(value)}`));
    }
    replace(this.legend, items);
  }

  resize() {
    const width = this.place.clientWidth;
    if (this.plot && width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }

  repaint() {
    if (this.plot) {
      this.shape = "";
      this.draw(this.chart);
    }
  }
}

export class BarChart extends LineChart {
  draw(chart) {
    const lines = chart.parts.map((part) => {
      const edges = part.edges;
      return { label: `${chart.parts.length > 1 ? `${part.run}, ` : ""}version ${part.version}`, x: edges, y: [...part.bars, part.bars.at(-1)], colour: part.colour, dash: [] };
    });
    super.draw({ ...chart, lines });
  }

  build(data) {
    this.plot?.destroy();
    const stepped = window.uPlot.paths.stepped({ align: 1 });
    this.columns = this.chart.lines.map((_, i) => i + 1);
    const series = [{}, ...this.chart.lines.map((line) => {
      const stroke = css(`--c${line.colour}`);
      return { stroke, fill: `${stroke}38`, width: 1.4, paths: stepped, spanGaps: true, points: { show: false } };
    })];
    this.plot = new window.uPlot({
      width: Math.max(this.place.clientWidth, 120),
      height: HEIGHT,
      padding: [8, 10, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { show: false } },
      scales: { x: { time: false }, y: { range: yRange("", true) } },
      axes: axes(this.chart.unit === "share" ? "share" : "value", "").map((axis, i) => (i === 0 && this.chart.unit !== "share" ? { ...axis, incrs: WHOLE_STEPS } : axis)),
      series,
    }, data, this.place);
  }

  drawLegend() {
    replace(this.legend, this.chart.lines.map((line) => h("li", {}, h("span", { class: `key c${line.colour}` }), h("span", { class: "label" }, line.label))));
  }
}
