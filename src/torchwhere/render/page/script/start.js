/* Fills the sections one after the other, so that the page responds as soon as the first is there. */

const SECTIONS = [
  ["ranks", showRanks],
  ["modules", showModules],
  ["collectives", showCollectives],
  ["steps", showSteps],
  ["device", showDevice],
  ["phases", showPhases],
  ["layout", showLayout],
  ["graphs", showGraphs],
  ["log", showLog],
];

function fillSection(id, show, report) {
  try {
    section(id).replaceChildren(...[show(report)].flat(Infinity).filter(Boolean));
  } catch (error) {
    section(id).replaceChildren(nothing(`This part could not be shown: ${error}.`));
    console.error(id, error);
  }
  document.getElementById(id).dataset.filled = "yes";
}

/* One section in each turn of the event loop, so that the page stays responsive. */
function fillAll(report, left = SECTIONS.filter(([id]) => document.getElementById(id))) {
  if (!left.length) {
    document.documentElement.dataset.ready = "yes";
    return;
  }
  fillSection(...left[0], report);
  setTimeout(() => fillAll(report, left.slice(1)), 0);
}

/* For printing, open all parts and use the light theme. Browsers announce it in one of two ways, or in both. */
function prepareForPrint() {
  let undo = null;
  const prepare = () => {
    if (undo) return;
    const theme = document.documentElement.dataset.theme;
    const closed = [...document.querySelectorAll("details:not([open])")];
    undo = () => {
      for (const part of closed) part.open = false;
      setTheme(theme);
    };
    for (const part of closed) {
      if (part.fill) part.fill();
      part.open = true;
    }
    setTheme("light");
  };
  const restore = () => {
    if (undo) undo();
    undo = null;
  };
  window.addEventListener("beforeprint", prepare);
  window.addEventListener("afterprint", restore);
  matchMedia("print").addEventListener("change", (event) => (event.matches ? prepare() : restore()));
}

/* Marks the link of the section on the screen. */
function markCurrent() {
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const visible = new Set();
  const update = (entries) => {
    for (const entry of entries) visible[entry.isIntersecting ? "add" : "delete"](entry.target.id);
    const first = [...links.keys()].find((id) => visible.has(id));
    for (const [id, link] of links) {
      if (id === first) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  };
  const observer = new IntersectionObserver(update, { rootMargin: "-80px 0px -50% 0px" });
  for (const id of links.keys()) observer.observe(document.getElementById(id));
}

themeSwitch();
prepareForPrint();
markCurrent();
requestAnimationFrame(() => setTimeout(() => fillAll(JSON.parse(document.getElementById("report").textContent)), 0));
