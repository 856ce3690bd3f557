/* Puts the sections in, one after the other, so that the page answers from the first one on. */

const SECTIONS = [
  ["ranks", showRanks],
  ["modules", showModules],
  ["collectives", showCollectives],
  ["steps", showSteps],
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

/* Each in a turn of its own: what is on the screen already stays alive. */
function fillAll(report, left = SECTIONS) {
  if (!left.length) {
    document.documentElement.dataset.ready = "yes";
    return;
  }
  fillSection(...left[0], report);
  setTimeout(() => fillAll(report, left.slice(1)), 0);
}

/* On paper everything is open, and light. Browsers tell of it in two ways, some in both. */
function readyForPaper() {
  let undo = null;
  const prepare = () => {
    if (undo) return;
    const theme = document.documentElement.dataset.theme;
    const closed = [...document.querySelectorAll("details:not([open])")];
    undo = () => {
      for (const each of closed) each.open = false;
      setTheme(theme);
    };
    for (const each of closed) {
      if (each.fill) each.fill();
      each.open = true;
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

/* The link of the section that is being read. */
function markCurrent() {
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const seen = new Set();
  const look = (entries) => {
    for (const entry of entries) seen[entry.isIntersecting ? "add" : "delete"](entry.target.id);
    const first = [...links.keys()].find((id) => seen.has(id));
    for (const [id, link] of links) {
      if (id === first) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  };
  const watch = new IntersectionObserver(look, { rootMargin: "-80px 0px -50% 0px" });
  for (const id of links.keys()) watch.observe(document.getElementById(id));
}

themeSwitch();
readyForPaper();
markCurrent();
requestAnimationFrame(() => setTimeout(() => fillAll(JSON.parse(document.getElementById("report").textContent)), 0));
