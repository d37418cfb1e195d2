// The page: chooses runs and view, and reloads what has changed.

import { linkTo, point, shown, view } from "./address.js";
import { duration, h, replace, number, share } from "./dom.js";
import { comparison, getJson, isSaved, listen } from "./data.js";
import { COLOURS } from "./charts.js";
import { Panels } from "./panels.js";
import { Episodes } from "./episodes.js";

const MOST_AT_FIRST = 4; // runs that are shown at first; if there are more, only the newest one is
const RETRY = 2000; // ms before a failed request is repeated
const byId = (id) => document.getElementById(id);

const state = { server: null, runs: [], chosen: null, stamps: new Map(), panels: new Map() };
const panels = new Panels(byId("charts"), (run, prompt) => {
  location.hash = linkTo("episodes", [["run", run], ["prompt", prompt]]);
});
const episodes = new Episodes(byId("episodes"));

// The existing runs that the address names.
function namedRuns() {
  return shown("charts").getAll("run").filter((name) => state.runs.some((run) => run.name === name));
}

// Shows what the address names; a bare view is shown as it was left.
function show() {
  const runs = namedRuns();
  if (runs.length && state.chosen !== null) state.chosen = new Set(runs);
  if (view() === "episodes") episodes.go(shown("episodes"));
  for (const name of ["charts", "episodes"]) {
    byId(name).hidden = view() !== name;
    if (view() === name) byId(`tab-${name}`).setAttribute("aria-current", "page");
    else byId(`tab-${name}`).removeAttribute("aria-current");
  }
  if (view() === "episodes") episodes.resume();
  else panels.resume();
  if (state.chosen !== null) {
    drawRuns();
    refresh();
  }
}

function chosenRuns() {
  return state.runs.filter((run) => state.chosen.has(run.name));
}

function colourOf(run) {
  return state.runs.findIndex((other) => other.name === run) % COLOURS;
}

async function onStatus(message) {
  const restarted = state.server !== null && state.server !== message.server;
  state.server = message.server;
  state.runs = message.runs;
  if (state.chosen === null) {
    const first = isSaved || state.runs.length <= MOST_AT_FIRST ? state.runs : state.runs.slice(0, 1);
    const named = namedRuns();
    state.chosen = new Set(named.length ? named : first.map((run) => run.name));
  }
  if (restarted) state.stamps.clear();
  onConnection(state.connection, state.made);
  drawRuns();
  episodes.setRuns(state.runs, restarted);
  await refresh();
}

let isLoading = false;
let isDue = false;

async function refresh() {
  // One refresh at a time; changes meanwhile are loaded afterwards.
  isDue = true;
  if (isLoading) return;
  isLoading = true;
  try {
    while (isDue) {
      isDue = false;
      const runs = chosenRuns();
      const outdated = runs.filter((run) => state.stamps.get(run.name) !== run.stamp);
      await Promise.all(
        outdated.map(async (run) => {
          const stamp = run.stamp;
          state.panels.set(run.name, await getJson("api/panels", { run: run.name }));
          state.stamps.set(run.name, stamp);
        }),
      );
      const drawn = runs.filter((run) => state.panels.has(run.name)).map((run) => ({ name: run.name, colour: colourOf(run.name), changes: run.changes, panels: state.panels.get(run.name) }));
      panels.draw(comparison ? [{ name: "", colour: 0, panels: [comparison] }, ...drawn] : drawn);
      document.body.dataset.loaded = runs.map((run) => `${run.name}:${state.stamps.get(run.name)}`).join(" ");
    }
  } catch (error) {
    onConnection("lost", String(error.message || error).slice(0, 120));
    setTimeout(refresh, RETRY);
  } finally {
    isLoading = false;
  }
}

function drawRuns() {
  const several = state.runs.length > 1;
  const focused = document.activeElement?.dataset?.run;
  replace(byId("runs"), state.runs.map((run) => {
    const on = state.chosen.has(run.name);
    const steps = run.steps ? ` / ${number(run.steps)}` : "";
    const bar = h("progress", { max: run.steps || 1, value: Math.min(run.step, run.steps || 1), "aria-label": "steps" });
    return h(
      several ? "button" : "div",
      { class: `run c${colourOf(run.name)}`, "data-run": run.name, title: run.path, ...(several ? { type: "button", "aria-pressed": String(on), onclick: () => toggle(run.name) } : {}) },
      h("span", { class: "swatch" }),
      h("span", { class: "run-name" }, run.name),
      h("span", { class: `state ${run.state.replace(" ", "-")}` }, run.state),
      h("span", { class: "run-figures" },
        h("span", {}, h("b", {}, number(run.step)), `${steps} steps`), bar,
        run.reward === null ? null : h("span", {}, "reward ", h("b", {}, number(run.reward))),
        run.accuracy === null ? null : h("span", {}, "accuracy ", h("b", {}, share(run.accuracy))),
        h("span", {}, h("b", {}, number(run.episodes)), run.reading ? " episodes, reading on" : " episodes"),
        run.seconds ? h("span", { class: "time" }, h("b", {}, duration(run.seconds)), run.left === null ? "" : `, about ${duration(run.left)} left`) : null),
      run.ended_with ? h("span", { class: run.state === "finished" ? "note" : "note error" }, `ended with: ${run.ended_with}`) : null,
      run.notes.length ? h("span", { class: "note" }, run.notes.join("; ")) : null,
    );
  }));
  if (focused) byId("runs").querySelector(`[data-run="${CSS.escape(focused)}"]`)?.focus();
}

function toggle(name) {
  if (!state.chosen.delete(name)) state.chosen.add(name);
  point("charts", panels.place(panels.panel, chosenRuns()));
  drawRuns();
  refresh();
}

function onConnection(kind, words = "") {
  const element = byId("connection");
  Object.assign(state, { connection: kind, made: words });
  element.className = `connection ${kind}`;
  // Only a running run is live.
  const live = state.runs.some((run) => run.state === "running") ? "live" : "connected";
  const text = kind === "lost" ? `connection lost, trying again ${words}` : words || live;
  if (element.textContent !== text) element.textContent = text;
}

const SCHEMES = { auto: "System's colours", light: "Light colours", dark: "Dark colours" };
const drawTheme = () => {
  byId("theme").textContent = SCHEMES[window.spoTheme.following];
  byId("theme").title = `Now: ${SCHEMES[window.spoTheme.choice].toLowerCase()}`;
};
byId("theme").addEventListener("click", () => window.spoTheme.next());
addEventListener("spo-theme", () => {
  drawTheme();
  panels.repaint();
});
addEventListener("hashchange", show);
drawTheme();
// No element has this id, or the Tab key would start from it.
if (!location.hash) history.replaceState(null, "", "#/charts");
document.querySelector(".skip").addEventListener("click", (event) => {
  // The link must not change the hash, which names the view.
  event.preventDefault();
  byId("main").focus();
});
show();
listen(onStatus, onConnection);
