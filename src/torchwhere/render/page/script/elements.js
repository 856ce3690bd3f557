/* Creates all elements. Markup cannot enter: every text becomes a text node, after `inert`. */

function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
    else made.setAttribute(name, value === true ? "" : inert(value));
  }
  put(made, children);
  return made;
}

function put(parent, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    parent.append(child instanceof Node ? child : document.createTextNode(inert(child)));
  }
  return parent;
}

/* A text from outside: isolated, so that right-to-left text does not reorder its neighbours; cut, with the whole in its title. */
function name(text, { longest = LONGEST, mono = true } = {}) {
  if (text === null || text === undefined || text === "") return null;
  const whole = inert(text);
  const shown = cut(whole, longest);
  const title = whole.length > FITS ? cut(whole, LONGEST_TITLE) : null;
  return el("bdi", { class: mono ? "name" : "sentence", title }, shown);
}

function section(id) {
  return document.querySelector(`#${id} .body`);
}

/* The text of an empty section: what is missing, and how to record it. */
function nothing(what, how) {
  return el("p", { class: "nothing" }, what, " ", how ? codes(how) : null);
}

/* One of our own texts with `code` in it. */
function codes(text) {
  return text.split("`").map((part, at) => (at % 2 ? el("code", {}, part) : part));
}

function choice(label, options, { value, onchange }) {
  const select = el("select", { on: { change: () => onchange(select.value) } });
  for (const [key, text] of options) select.append(el("option", { value: key, selected: key === value }, cut(inert(text), 60)));
  return el("label", { class: "control" }, el("span", {}, label), select);
}

function searchBox(label, { placeholder, oninput, onenter }) {
  const input = el("input", { type: "search", placeholder, autocomplete: "off", spellcheck: "false" });
  input.addEventListener("input", () => oninput && oninput(input.value.trim()));
  input.addEventListener("keydown", (event) => event.key === "Enter" && onenter && onenter(input.value.trim()));
  return el("label", { class: "control" }, el("span", {}, label), input);
}

function button(text, onclick, properties = {}) {
  return el("button", { type: "button", ...properties, on: { click: onclick } }, text);
}

/* A part that opens. Its content is made when it opens first. */
function fold(title, make, { open = false } = {}) {
  const made = el("details", {}, el("summary", {}, title));
  const fill = () => {
    if (made.childElementCount === 1) put(made, [make()].flat());
  };
  made.addEventListener("toggle", () => made.open && fill());
  made.fill = fill; // before printing
  if (open) {
    fill();
    made.open = true;
  }
  return made;
}

/* The tooltip, shared by all maps. */
const tip = {
  box: null,
  show(lines, x, y) {
    this.box ??= document.body.appendChild(el("div", { class: "tip", "aria-hidden": "true" }));
    this.box.replaceChildren(
      ...lines.filter(Boolean).map((line, at) => el("div", { class: at ? "" : "first" }, cut(inert(line), 160))),
    );
    this.box.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = this.box;
    const left = x + 14 + width > innerWidth - 4 ? x - width - 10 : x + 14;
    this.box.style.left = `${Math.max(4, left)}px`;
    this.box.style.top = `${Math.max(4, y + 16 + height > innerHeight ? y - height - 10 : y + 16)}px`;
  },
  hide() {
    if (this.box) this.box.hidden = true;
  },
};

/* A text for screen readers. */
function liveRegion() {
  return el("p", { class: "unseen", role: "status", "aria-live": "polite" });
}
