// The page's address names what is shown: the view, and in it runs, panel, filters and episode. It can be sent to others.

export function view() {
  return location.hash.startsWith("#/episodes") ? "episodes" : "charts";
}

// The values in the address, if it is that of a view; else none.
export function shown(name) {
  const [, query = ""] = location.hash.split("?");
  return new URLSearchParams(view() === name ? query : "");
}

export function linkTo(name, values) {
  const query = new URLSearchParams(values.filter(([, value]) => value !== "" && value !== null && value !== undefined));
  return `#/${name}${`${query}` && `?${query}`}`;
}

// Names what is shown now, without a step in the browser's history.
export function point(name, values) {
  if (view() === name) history.replaceState(null, "", linkTo(name, values));
}
