// Tables of one or several runs, with a filter if they are long.

import { h, replace, number } from "./dom.js";

const MANY = 20; // from this number of rows on, a table has a filter

export class Table {
  constructor(element, onPrompt) {
    this.onPrompt = onPrompt;
    this.note = h("p", { class: "note" });
    this.filter = h("input", { type: "search", placeholder: "filter", "aria-label": "Filter the rows", oninput: () => this.rows() });
    this.only = h("label", { class: "only" }, h("input", { type: "checkbox", onchange: () => this.rows() }), " only what differs");
    this.body = h("div", { class: "scroll", tabindex: "0" });
    element.append(h("div", { class: "table-head" }, this.filter, this.only), this.note, this.body);
  }

  draw(parts) {
    this.parts = parts;
    const rows = Math.max(...parts.map((part) => part.rows.length));
    this.filter.hidden = rows < MANY;
    // Key-value tables of several runs are compared key by key.
    this.isCompared = parts.length > 1 && parts[0].columns.length === 2;
    this.only.hidden = !this.isCompared;
    this.note.textContent = parts.map((part) => part.note).filter(Boolean).join(" · ");
    this.rows();
  }

  rows() {
    const needle = this.filter.value.toLowerCase();
    const fits = ({ cells, text }) => !needle || [...cells, text].some((cell) => String(cell ?? "").toLowerCase().includes(needle));
    const { columns, rows } = this.isCompared ? this.compared() : this.listed();
    const head = h("thead", {}, h("tr", {}, columns.map((name) => h("th", { scope: "col" }, name))));
    const body = rows.filter(fits).map((row) => h("tr", { class: row.differs ? "differs" : null }, row.cells.map((cell, i) => this.cell(cell, i, row))));
    replace(this.body, h("table", {}, head, h("tbody", {}, body)));
  }

  listed() {
    const several = this.parts.length > 1;
    const columns = several ? ["run", ...this.parts[0].columns] : this.parts[0].columns;
    const rows = this.parts.flatMap((part) => part.rows.map((cells, i) => ({ run: part.run, text: part.texts?.[i], cells: several ? [part.run, ...cells] : cells })));
    return { columns, rows };
  }

  compared() {
    const maps = this.parts.map((part) => new Map(part.rows));
    const keys = [...new Set(maps.flatMap((map) => [...map.keys()]))];
    const rows = keys.map((key) => {
      const values = maps.map((map) => map.get(key) ?? null);
      return { cells: [key, ...values], differs: values.some((value) => value !== values[0]) };
    });
    const only = this.only.querySelector("input").checked;
    return { columns: [this.parts[0].columns[0], ...this.parts.map((part) => part.run)], rows: only ? rows.filter((row) => row.differs) : rows };
  }

  cell(value, i, row) {
    const column = this.isCompared ? "" : this.parts[0].columns[this.parts.length > 1 ? i - 1 : i];
    const isNumber = typeof value === "number";
    if (column === "prompt") {
      const open = () => this.onPrompt(row.run, value);
      return h("td", {}, h("button", { type: "button", class: "link", title: value, onclick: open }, row.text ?? value));
    }
    // Short texts are not broken; long ones, such as paths, may be.
    const name = isNumber ? "number" : String(value ?? "").length < 20 ? "word" : null;
    return h("td", { class: name }, isNumber ? number(value) : (value ?? "–"));
  }
}
