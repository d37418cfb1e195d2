// The episode browser: a list that the server filters, searches and pages, and next to it one episode.

import { point } from "./address.js";
import { h, marked, prose, replace, number } from "./dom.js";
import { getJson } from "./data.js";
import { EpisodeView } from "./episode.js";

const COUNT = 50; // episodes on a page
const SORTS = { "-step": "newest first", step: "oldest first", "-reward": "highest reward", reward: "lowest reward", "-tokens": "most tokens", tokens: "fewest tokens", "-turns": "most turns", "-seconds": "slowest", "-sampled": "longest answer", prompt: "by prompt" };
const KIND_WORDS = { "": "all kinds", train: "training", eval: "held-out", skipped: "skipped", "tool error": "tool errors", failed: "skipped or tool error", cut: "cut record", "with tokens": "with tokens" };
const WAIT = 250; // ms after the last key
const FILTERS = ["text", "kind", "reason", "generator", "reward", "version", "prompt", "sort"];

// Sets a field; a list gets the value if it lacks it.
function choose(field, value) {
  if (field.options && ![...field.options].some((option) => option.value === value)) field.append(h("option", { value }, value));
  field.value = value;
}

export class Episodes {
  constructor(element) {
    this.element = element;
    this.run = null;
    this.starts = [0]; // start of each page up to the current one
    this.rows = [];
    this.at = -1;
    this.asked = 0;
    this.build();
    document.addEventListener("keydown", (event) => this.onKey(event));
  }

  build() {
    const field = (name, label, attributes) => h("label", { class: `field ${name}` }, h("span", {}, label), (this[name] = h("input", { name, oninput: () => this.later(), autocomplete: "off", spellcheck: "false", ...attributes })));
    const choice = (name, label, options) => h("label", { class: `field ${name}` }, h("span", {}, label), (this[name] = h("select", { name, onchange: () => this.restart() }, Object.entries(options).map(([value, words]) => h("option", { value }, words)))));
    this.filters = h("form", { class: "filters", role: "search", "aria-label": "Filter the episodes", onsubmit: (event) => event.preventDefault() },
      field("text", "Search", { type: "search", placeholder: "words in prompt, answer, tools   /" }),
      h("button", { type: "button", class: "quiet more", onclick: () => this.filters.classList.toggle("all") }, "Filters"),
      choice("runChoice", "Run", {}),
      choice("kind", "Kind", KIND_WORDS),
      choice("reason", "Ending", { "": "any" }),
      choice("generator", "Generator", { "": "any" }),
      field("reward", "Reward", { size: 7, placeholder: "such as <0.5" }),
      field("version", "Sampled by version", { inputmode: "numeric", size: 5 }),
      field("prompt", "Prompt", { size: 12, placeholder: "id or words" }),
      choice("sort", "Order", SORTS),
      h("button", { type: "reset", class: "quiet", onclick: () => setTimeout(() => this.restart()) }, "Clear"));
    this.list = h("ul", { class: "list", role: "listbox", tabindex: "0", "aria-label": "Episodes", onclick: (event) => this.onClick(event) });
    this.count = h("span", { role: "status" });
    this.previous = h("button", { type: "button", class: "quiet", "aria-label": "Previous page", onclick: () => this.turn(-1) }, "‹");
    this.next = h("button", { type: "button", class: "quiet", "aria-label": "Next page", onclick: () => this.turn(1) }, "›");
    this.detail = h("article", { class: "episode", tabindex: "-1", "aria-label": "Episode" });
    this.view = new EpisodeView(this.detail, { onPrompt: (prompt) => this.go(new URLSearchParams({ run: this.run, prompt })), onBack: () => this.close() });
    this.panes = h("div", { class: "panes" },
      h("div", { class: "side" }, h("div", { class: "pager" }, this.count, this.previous, this.next), this.list, h("p", { class: "keys" }, h("kbd", {}, "j"), h("kbd", {}, "k"), " next, previous  ", h("kbd", {}, "/"), " search  ", h("kbd", {}, "Esc"), " list")),
      this.detail);
    this.element.append(this.filters, this.panes);
  }

  setRuns(runs, isNew) {
    const names = runs.map((run) => run.name);
    if (!names.includes(this.run)) this.run = names[0] ?? null;
    if ([...this.runChoice.options].map((option) => option.value).join("\n") !== names.join("\n")) {
      replace(this.runChoice, names.map((name) => h("option", { value: name }, name)));
      this.runChoice.closest("label").hidden = names.length < 2;
    }
    this.runChoice.value = this.run;
    const status = runs.find((run) => run.name === this.run);
    const version = status ? `${this.run} ${status.episodes}` : "";
    this.reading = Boolean(status?.reading);
    if (version !== this.shownVersion || isNew) {
      this.shownVersion = version;
      // Only the first page follows new episodes, so that a later page does not change while it is read.
      if (this.element.hidden) this.isDue = true;
      else if (this.starts.length === 1) this.load();
    }
  }

  resume() {
    if (this.isDue) {
      this.isDue = false;
      this.load();
    }
  }

  // Shows what an address names: a run, filters, and an episode by its file and offset.
  go(values) {
    if (`${values}` === "") return;
    this.filters.reset();
    this.run = values.get("run") ?? this.run;
    this.runChoice.value = this.run;
    for (const name of FILTERS) if (values.has(name)) choose(this[name], values.get(name));
    this.wanted = values.has("file") ? { file: values.get("file"), offset: Number(values.get("offset")) } : null;
    this.restart();
  }

  // Puts what is shown into the address.
  point() {
    const { file, offset } = this.place ?? {};
    const filters = FILTERS.map((name) => [name, this[name].value.trim()]).filter(([name, value]) => name !== "sort" || value !== "-step");
    point("episodes", [["run", this.run], ...filters, ["file", file], ["offset", offset]]);
  }

  later() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.restart(), WAIT);
  }

  restart() {
    clearTimeout(this.timer);
    const run = this.runChoice.value || this.run;
    if (run !== this.run) this.place = null;
    this.run = run;
    this.starts = [0];
    this.at = -1;
    this.load();
  }

  turn(by) {
    if (by > 0 && this.after !== null && this.after !== undefined) this.starts.push(this.after);
    else if (by < 0 && this.starts.length > 1) this.starts.pop();
    else return Promise.resolve();
    this.at = -1;
    return this.load();
  }

  async load() {
    if (!this.run) return;
    const asked = ++this.asked;
    const filters = Object.fromEntries(FILTERS.map((name) => [name, this[name].value.trim()]));
    try {
      const [page, words] = await Promise.all([
        getJson("api/episodes", { run: this.run, ...filters, start: this.starts.at(-1), count: COUNT }),
        getJson("api/words", { run: this.run }),
      ]);
      if (asked !== this.asked) return; // a newer request was sent meanwhile
      this.setWords("reason", words.reasons);
      this.setWords("generator", words.generators);
      this.show(page, filters);
    } catch (error) {
      if (asked !== this.asked) return;
      this.count.textContent = String(error.message || error).slice(0, 200);
    }
  }

  setWords(name, words) {
    const select = this[name];
    if ([...select.options].slice(1).map((option) => option.value).join("\n") === words.join("\n")) return;
    const value = select.value;
    replace(select, h("option", { value: "" }, "any"), words.map((word) => h("option", { value: word }, word)));
    choose(select, value);
  }

  show(page, filters) {
    const open = this.rows[this.at];
    this.rows = page.rows;
    this.after = page.next;
    this.at = open ? this.rows.findIndex((row) => row.file === open.file && row.offset === open.offset) : -1;
    replace(this.list, this.rows.map((row, i) => this.row(row, i)));
    const isFiltered = Object.entries(filters).some(([name, value]) => value && name !== "sort");
    const first = this.starts.at(-1) + 1;
    if (this.rows.length === 0) {
      this.count.textContent = page.next !== null ? "none in this part, continue ›" : isFiltered ? "no episode matches" : this.reading ? "reading …" : "no episodes are kept";
      if (!isFiltered && !this.reading) replace(this.list, h("li", { class: "missing" }, prose("This run folder holds no episodes: `episode.rollouts_every` above 0 keeps training episodes, `data.heldout` held-out ones.")));
    } else if (page.total === null) this.count.textContent = `${number(this.rows.length)} found${page.next === null ? "" : ", more may follow ›"}`;
    else this.count.textContent = `${number(first)}–${number(first + this.rows.length - 1)} of ${number(page.total)}${this.reading ? ", reading on" : ""}`;
    this.previous.disabled = this.starts.length === 1;
    this.next.disabled = page.next === null;
    this.mark();
    const { wanted } = this;
    this.wanted = null;
    if (wanted) this.read(wanted, this.rows.findIndex((row) => row.file === wanted.file && row.offset === wanted.offset), true);
    else if (!this.place && this.rows.length && this.isWide()) this.open(0, false);
    else this.point();
  }

  // The words by which episodes are searched.
  words() {
    return [this.text.value.trim(), this.prompt.value.trim()];
  }

  row(row, i) {
    const kind = row.flags.includes("skipped") ? "aside" : row.reward === null ? "" : row.reward > 0 ? "good" : "bad";
    return h("li", { role: "option", id: `episode-${i}`, "data-at": i, "aria-selected": "false" },
      h("span", { class: `reward ${kind}` }, row.flags.includes("skipped") ? "skipped" : number(row.reward)),
      h("span", { class: "prompt" }, marked(row.prompt || "(no prompt)", this.words())),
      h("span", { class: "about" }, `step ${number(row.step)} · ${row.reason || "–"} · ${number(row.tokens)} tokens`, row.turns > 1 ? ` · ${row.turns} turns` : "", row.flags.filter((flag) => flag !== "tokens" && flag !== "user" && flag !== "skipped").map((flag) => h("span", { class: "flag" }, flag))));
  }

  onClick(event) {
    const row = event.target.closest("li[data-at]");
    if (row) this.open(Number(row.dataset.at), true);
  }

  mark() {
    for (const [i, row] of [...this.list.children].entries()) row.setAttribute("aria-selected", String(i === this.at));
    if (this.at >= 0) this.list.setAttribute("aria-activedescendant", `episode-${this.at}`);
    else this.list.removeAttribute("aria-activedescendant");
  }

  open(at, isChosen) {
    return this.read(this.rows[at], at, isChosen);
  }

  // Shows an episode; `at` is its place in the list, -1 if it is not on this page of it.
  async read({ file, offset }, at, isChosen) {
    this.at = at;
    this.place = { file, offset };
    this.point();
    this.mark();
    this.list.children[at]?.scrollIntoView({ block: "nearest" });
    if (isChosen) this.panes.classList.add("reading");
    try {
      const episode = await getJson("api/episode", { run: this.run, file, offset });
      // Another one may have been chosen meanwhile.
      if (this.place.file === file && this.place.offset === offset) this.view.draw(episode, this.words());
    } catch (error) {
      this.view.fail(String(error.message || error).slice(0, 200));
    }
  }

  close() {
    this.panes.classList.remove("reading");
    this.list.focus();
  }

  async step(by) {
    const at = this.at + by;
    if (at >= 0 && at < this.rows.length) return this.open(at, !this.isWide() && this.panes.classList.contains("reading"));
    if (by > 0 && this.after !== null) {
      await this.turn(1);
      if (this.rows.length) return this.open(0, false);
    } else if (at < 0 && this.starts.length > 1) {
      await this.turn(-1);
      return this.open(this.rows.length - 1, false);
    }
    return undefined;
  }

  isWide() {
    return matchMedia("(min-width: 900px)").matches;
  }

  onKey(event) {
    if (this.element.hidden || event.ctrlKey || event.metaKey || event.altKey) return;
    const isTyping = event.target.matches("input, select, textarea");
    if (event.key === "Escape") {
      this.close();
    } else if (event.key === "Enter" && event.target === this.text) {
      this.restart();
      this.list.focus();
    } else if (isTyping) {
      return;
    } else if (event.key === "/") {
      this.text.focus();
      this.text.select();
    } else if (event.key === "j" || (event.key === "ArrowDown" && event.target === this.list)) {
      this.step(1);
    } else if (event.key === "k" || (event.key === "ArrowUp" && event.target === this.list)) {
      this.step(-1);
    } else if (event.key === "Enter" && event.target === this.list) {
      this.panes.classList.add("reading");
      this.detail.focus();
    } else {
      return;
    }
    event.preventDefault();
  }
}
