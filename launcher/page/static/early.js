// Before the first paint, so that a page in dark never flashes in light.
(() => {
  const CHOICES = ["auto", "light", "dark"];
  let choice = "auto";
  try {
    choice = localStorage.getItem("spo-theme") || "auto";
  } catch {
    // A browser that keeps nothing for this page follows the system.
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
    next() {
      choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
      try {
        localStorage.setItem("spo-theme", choice);
      } catch {
        // It holds until the page is left.
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
// A browser started without a locale calls its language en-US@posix, which its own Intl, and so uPlot, does not take.
try {
  new Intl.NumberFormat(navigator.language);
} catch {
  Object.defineProperty(navigator, "language", { value: "en-US" });
}
