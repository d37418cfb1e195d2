// Runs before the first paint, so that a dark page never flashes in light colours.
(() => {
  const CHOICES = ["auto", "light", "dark"];
  let choice = "auto";
  try {
    choice = localStorage.getItem("spo-theme") || "auto";
  } catch {
    // Without storage, the page follows the system.
  }
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    document.documentElement.dataset.theme = choice !== "auto" ? choice : system.matches ? "dark" : "light";
  };
  apply();
  window.spoTheme = {
    get choice() {
      return choice;
    },
    get following() {
      return CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
    },
    next() {
      choice = this.following;
      try {
        localStorage.setItem("spo-theme", choice);
      } catch {
        // Without storage, the choice is lost with the page.
      }
      apply();
      window.dispatchEvent(new Event("spo-theme"));
    },
  };
  system.addEventListener("change", () => {
    apply();
    window.dispatchEvent(new Event("spo-theme"));
  });
})();
// A browser without a locale reports the language en-US@posix, which its own Intl, and therefore uPlot, rejects.
try {
  new Intl.NumberFormat(navigator.language);
} catch {
  Object.defineProperty(navigator, "language", { value: "en-US" });
}
