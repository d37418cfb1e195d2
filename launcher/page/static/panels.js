// Draws the panels: charts of the same name from all chosen runs together, and a text in place of empty charts.

import { linkTo, point, shown } from "./address.js";
import { h, prose, replace } from "./dom.js";
import { BarChart, LineChart, strokes } from "./charts.js";
import { Pairs } from "./pairs.js";
import { Table } from "./tables.js";

const DRAWINGS = { lines: LineChart, bars: BarChart, table: Table, pairs: Pairs };

// A busy browser is never idle, so that a call also comes after some time.
const AFTER = 100; // ms
const whenIdle = window.requestIdleCallback
  ? (call) => requestIdleCallback(call, { timeout: AFTER })
  : (call) => setTimeout(call, AFTER);

function hasData(chart) {
  return (chart.lines ?? chart.bars ?? chart.rows ?? chart.pairs ?? []).length > 0;
}

export class Panels {
  constructor(element, onPrompt) {
    this.element = element;
    this.onPrompt = onPrompt;
    this.nav = h("nav", { class: "jump", "aria-label": "Panels" });
    this.body = h("div", { class: "panels" });
    element.append(this.nav, this.body);
    this.sections = new Map();
    this.runs = [];
    // A card near the screen is drawn at once, the others one by one while the browser is idle, or before it prints.
    this.watcher = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const card = entry.target.card;
        card.isVisible = entry.isIntersecting;
        if (entry.isIntersecting) this.drawCard(card);
      }
    }, { rootMargin: "300px" });
    addEventListener("beforeprint", () => this.cards().forEach((card) => this.drawCard(card)));
  }

  cards() {
    return [...this.sections.values()].flatMap((section) => [...section.byName.values()]);
  }

  drawLater() {
    if (this.isWaiting) return;
    this.isWaiting = true;
    whenIdle(() => {
      this.isWaiting = false;
      const card = this.element.hidden ? undefined : this.cards().find((one) => one.drawn !== one.parts);
      if (!card) return;
      this.drawCard(card);
      this.drawLater();
    });
  }

  draw(runs) {
    this.runs = runs;
    if (this.element.hidden) {
      this.isDue = true;
      return;
    }
    this.isDue = false;
    const names = [...new Set(runs.flatMap((run) => run.panels.map((panel) => panel.name)))];
    for (const name of names) {
      const parts = runs.flatMap((run) => run.panels.filter((panel) => panel.name === name).map((panel) => ({ run, panel })));
      this.drawPanel(name, parts);
    }
    for (const [name, section] of this.sections) section.element.hidden = !names.includes(name);
    const links = names.map((name) => linkTo("charts", this.place(name)));
    // Unchanged links are not replaced, so that they keep the focus.
    if (runs.length === 0) replace(this.nav, h("p", { class: "missing" }, "No run is chosen."));
    else if (`${links}` !== this.links) {
      replace(this.nav, names.map((name, i) => h("a", { href: links[i], onclick: (event) => this.onLink(event, name) }, this.sections.get(name).title.textContent)));
    }
    this.links = `${links}`;
    const wanted = shown("charts").get("panel");
    if (wanted !== this.panel && this.sections.has(wanted)) this.show(wanted);
  }

  // What the address of the charts names.
  place(panel, runs = this.runs) {
    return [...runs.filter((run) => run.name).map((run) => ["run", run.name]), ["panel", panel]];
  }

  onLink(event, name) {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return; // a new tab or window
    event.preventDefault();
    this.show(name);
    point("charts", this.place(name));
  }

  show(name) {
    this.panel = name;
    const { element } = this.sections.get(name);
    element.scrollIntoView();
    element.focus({ preventScroll: true });
  }

  drawPanel(name, parts) {
    let section = this.sections.get(name);
    if (!section) {
      const title = h("h2", {}, parts[0].panel.title);
      section = { title, words: h("div", { class: "words" }), cards: h("div", { class: "cards" }), missing: h("div", { class: "missing" }), byName: new Map() };
      section.element = h("section", { class: "panel", id: `panel-${name}`, tabindex: "-1", "data-panel": name }, title, section.words, section.cards);
      section.cards.append(section.missing);
      this.sections.set(name, section);
      this.body.append(section.element);
    }
    const several = parts.length > 1;
    replace(section.words, parts.filter(({ panel }) => panel.words).map(({ run, panel }) => h("p", {}, several ? h("b", {}, `${run.name}: `) : null, panel.words)));
    const charts = [...new Set(parts.flatMap(({ panel }) => panel.charts.map((chart) => chart.name)))];
    const missing = new Map();
    for (const chartName of charts) {
      const of = parts.map(({ run, panel }) => ({ run: run.name, colour: run.colour, changes: run.changes, chart: panel.charts.find((chart) => chart.name === chartName) })).filter((part) => part.chart);
      const filled = of.filter((part) => hasData(part.chart));
      if (filled.length === 0) {
        const { title, missing: words } = of[0].chart;
        if (words) missing.set(words, [...(missing.get(words) ?? []), title]);
      }
      this.setCard(section, chartName, filled);
    }
    for (const chartName of section.byName.keys()) if (!charts.includes(chartName)) this.setCard(section, chartName, []);
    replace(section.missing, [...missing].map(([words, titles]) => h("p", {}, h("b", {}, titles.join(", ")), h("br"), prose(words))));
  }

  setCard(section, name, parts) {
    let card = section.byName.get(name);
    if (parts.length === 0) {
      if (card) card.element.hidden = true;
      return;
    }
    const { kind, title, note } = parts[0].chart;
    if (!card) {
      const element = h("article", { class: `card ${kind}`, "data-chart": name }, h("h3", {}, title), note && kind !== "table" ? h("p", { class: "note" }, note) : null);
      card = { element, kind, drawing: null, isVisible: false };
      element.card = card;
      section.byName.set(name, card);
      section.missing.before(element);
      this.watcher.observe(element);
    }
    card.element.hidden = false;
    card.parts = parts;
    if (card.isVisible) this.drawCard(card);
    else this.drawLater();
  }

  drawCard(card) {
    if (card.drawn === card.parts || !card.parts) return;
    card.drawn = card.parts;
    card.drawing ??= new DRAWINGS[card.kind](card.element, this.onPrompt);
    const chart = card.parts[0].chart;
    const parts = card.parts.map((part) => ({ ...part.chart, run: part.run, colour: part.colour }));
    const changes = card.parts.flatMap((part) => (chart.x === "step" ? part.changes ?? [] : []).map((change) => ({ ...change, colour: part.colour, words: card.parts.length > 1 ? `${part.run}, ${change.words}` : change.words })));
    if (card.kind === "lines") card.drawing.draw({ ...chart, lines: strokes(parts), changes });
    else if (card.kind === "bars") card.drawing.draw({ ...chart, parts: parts.map((part) => ({ ...part, colour: parts.length > 1 ? part.colour : 0 })) });
    else card.drawing.draw(parts);
    card.element.dataset.drawn = "yes";
  }

  resume() {
    if (this.isDue) this.draw(this.runs);
  }

  repaint() {
    for (const card of this.cards()) card.drawing?.repaint?.();
  }
}
