/* Light or dark: as the system has it, until somebody says otherwise. Kept where a page from disk may keep things. */

const KEPT_AS = "torchwhere-theme";

function keptTheme() {
  try {
    return localStorage.getItem(KEPT_AS);
  } catch {
    return null; // storage is closed to pages like this one
  }
}

function keepTheme(theme) {
  try {
    localStorage.setItem(KEPT_AS, theme);
  } catch {
    // then it is not kept
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
  const kept = keptTheme();
  if (kept === "light" || kept === "dark") root.dataset.theme = kept;
  const isDark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const made = document.getElementById("theme");
  const say = () => {
    made.textContent = isDark() ? "Light" : "Dark";
    made.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} theme`);
  };
  made.addEventListener("click", () => {
    setTheme(isDark() ? "light" : "dark");
    keepTheme(root.dataset.theme);
    say();
  });
  system.addEventListener("change", () => (say(), palette.changed()));
  say();
  made.hidden = false;
}
