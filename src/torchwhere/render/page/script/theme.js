/* Light or dark: the system's theme until the user chooses one. Local storage keeps the choice, if the browser allows it. */

const STORAGE_KEY = "torchwhere-theme";

function storedTheme() {
  try {
    return localStorage.getItem(STORAGE_KEY);
  } catch {
    return null; // the browser denies storage to pages from disk
  }
}

function storeTheme(theme) {
  try {
    localStorage.setItem(STORAGE_KEY, theme);
  } catch {
    // the choice is not kept
  }
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  palette.changed();
}

function themeSwitch() {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const stored = storedTheme();
  if (stored === "light" || stored === "dark") root.dataset.theme = stored;
  const isDark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const button = document.getElementById("theme");
  const label = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} theme`);
  };
  button.addEventListener("click", () => {
    setTheme(isDark() ? "light" : "dark");
    storeTheme(root.dataset.theme);
    label();
  });
  system.addEventListener("change", () => (label(), palette.changed()));
  label();
  button.hidden = false;
}
