/* The rank map: a cell for each rank, as large as fits. A few ranks are tiles with text, thousands are dots.
 *
 * A state has a colour and a symbol, never a colour alone: a letter, or a shape if the cell is too small for one. */

const STATES = {
  running: ["R", "running"],
  waiting: ["W", "waiting in a collective"],
  stopped: ["S", "stopped by a signal"],
  dead: ["D", "dead"],
  finished: ["F", "finished"],
  unknown: ["?", "no box, not known"],
};

function knownState(state) {
  return Object.hasOwn(STATES, state) ? state : "unknown";
}

const MARGIN = 2; // room for the rings around cells at the edge
const MOST_PINS = 12;

class RankMap {
  constructor(report, onselect) {
    this.ranks = report.ranks;
    this.grid = new RankGrid(this.ranks);
    this.size = this.grid.size;
    this.culprits = new Set(report.verdict.culprits || []);
    this.onselect = onselect;
    this.colourBy = "state";
    this.focused = this.selected = 0;
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.status = liveRegion();
    const label = `Map of ${plural(this.size, "rank")}. Arrow keys move, Enter shows a rank.`;
    this.frame = el(
      "div",
      { class: "rankmap", tabindex: "0", role: "application", "aria-roledescription": "rank map", "aria-label": label },
      this.canvas,
      this.status,
    );
    this.legend = el("p", { class: "legend" });
    this.listen();
    redrawOnChange(this.frame, (width) => this.arrange(width));
  }

  arrange(width) {
    this.wholeWidth = width;
    this.grid.arrange(width - 2 * MARGIN);
    this.draw();
  }

  group(by) {
    this.grid.groupBy = by;
    if (this.wholeWidth) this.arrange(this.wholeWidth);
  }

  colour(by) {
    this.colourBy = by;
    this.draw();
  }

  /* -- drawing ------------------------------------------------------------------------------------------------------ */

  draw() {
    if (!this.wholeWidth) return; // not on the screen yet
    const ctx = sized(this.canvas, this.wholeWidth, this.grid.height + 2 * MARGIN);
    ctx.translate(MARGIN, MARGIN);
    if (this.grid.hasLabels) this.drawLabels(ctx);
    this.scale = this.colourBy === "state" ? null : this.scaleOf();
    for (let at = 0; at < this.size; at++) this.drawRank(ctx, at);
    this.drawCulprits(ctx);
    this.ring(ctx, this.selected, "--text", 2, 1);
    if (document.activeElement === this.frame) this.ring(ctx, this.focused, "--focus", 3, 1);
    this.drawLegend();
  }

  drawLabels(ctx) {
    ctx.font = `11px ${FONT}`;
    ctx.textBaseline = "alphabetic";
    ctx.textAlign = "left";
    ctx.fillStyle = palette.get("--muted");
    for (const block of this.grid.blocks) ctx.fillText(fitText(ctx, block.label, block.width - 4), block.x, block.y + 11);
  }

  values() {
    return { behind: this.ranks.behind, calls: this.ranks.behind_calls, age: this.ranks.age_ms }[this.colourBy];
  }

  scaleOf() {
    return this.values().reduce((most, value) => Math.max(most, value || 0), 0);
  }

  valueText(value) {
    if (value === null || value === undefined) return "not known";
    return this.colourBy === "age" ? duration(value) : count(value);
  }

  colours(at) {
    if (this.colourBy === "state") {
      const state = this.state(at);
      return [palette.get(`--state-${state}`), palette.get(`--on-${state}`)];
    }
    const value = this.values()[at];
    return value === null || value === undefined ? [null, palette.get("--text")] : heat(this.scale ? value / this.scale : 0);
  }

  state(at) {
    return knownState(this.ranks.states[this.ranks.state[at]]);
  }

  drawRank(ctx, at) {
    const [fill, text] = this.colours(at);
    const [x, y] = [this.grid.x[at], this.grid.y[at]];
    const isUnknown = fill === null || (this.colourBy === "state" && this.state(at) === "unknown");
    if (isUnknown) hatch(ctx, x, y, this.grid.cellWidth, this.grid.cellHeight);
    else {
      ctx.fillStyle = fill;
      ctx.fillRect(x, y, this.grid.cellWidth, this.grid.cellHeight);
    }
    ctx.fillStyle = ctx.strokeStyle = isUnknown ? palette.get("--text") : text;
    if (this.size <= TILES) this.drawTile(ctx, at, x, y);
    else if (this.grid.cellHeight >= 22) this.drawNumber(ctx, at, x, y);
    else if (this.colourBy === "state" && this.grid.cellHeight >= 14) this.drawLetter(ctx, at, x, y);
    else if (this.colourBy === "state") drawShape(ctx, this.state(at), x, y, this.grid.cellHeight);
  }

  drawTile(ctx, at, x, y) {
    const { ranks } = this;
    const room = this.grid.cellWidth - 22;
    ctx.textBaseline = "alphabetic";
    ctx.textAlign = "left";
    ctx.font = `600 17px ${FONT}`;
    ctx.fillText(String(ranks.rank[at]), x + 11, y + 22);
    ctx.textAlign = "right";
    ctx.font = `600 11px ${FONT}`;
    const value = this.colourBy === "state" ? this.state(at) : this.valueText(this.values()[at]);
    ctx.fillText(value, x + this.grid.cellWidth - 11, y + 20);
    ctx.textAlign = "left";
    ctx.font = `11px ${FONT}`;
    ctx.fillText(ranks.step[at] === null ? "" : `step ${ranks.step[at]}`, x + 11, y + 38);
    const [cpu, device] = [ranks.places[ranks.place[at]] ?? "", devicePlace(ranks, at)];
    ctx.fillText(fitText(ctx, inert(ranks.devices ? `CPU: ${cpu}` : cpu), room), x + 11, y + 52);
    if (device) ctx.fillText(fitText(ctx, inert(`Device: ${device}`), room), x + 11, y + 66);
  }

  drawNumber(ctx, at, x, y) {
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    const hasTwo = this.grid.cellHeight >= 30;
    const size = this.grid.cellHeight >= 36 ? 13 : this.grid.cellHeight >= 26 ? 11 : 10;
    ctx.font = `${size === 13 ? 600 : 500} ${size}px ${FONT}`;
    ctx.fillText(
      String(this.ranks.rank[at]),
      x + this.grid.cellWidth / 2,
      y + this.grid.cellHeight * (hasTwo ? 0.36 : 0.5),
      this.grid.cellWidth - 2,
    );
    if (!hasTwo) return;
    ctx.font = `10px ${FONT}`;
    const below = this.colourBy === "state" ? STATES[this.state(at)][0] : this.valueText(this.values()[at]);
    ctx.fillText(below, x + this.grid.cellWidth / 2, y + this.grid.cellHeight * 0.74, this.grid.cellWidth - 4);
  }

  drawLetter(ctx, at, x, y) {
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    ctx.font = `600 ${Math.min(11, this.grid.cellHeight - 5)}px ${FONT}`;
    ctx.fillText(STATES[this.state(at)][0], x + this.grid.cellWidth / 2, y + this.grid.cellHeight / 2 + 0.5);
  }

  /* `out`: the distance of the ring's middle line from the cell. */
  ring(ctx, at, colour, width, out) {
    ctx.strokeStyle = palette.get(colour);
    ctx.lineWidth = width;
    ctx.strokeRect(this.grid.x[at] - out, this.grid.y[at] - out, this.grid.cellWidth + 2 * out, this.grid.cellHeight + 2 * out);
  }

  /* A ring inside the cell, separated from its colour. A dot gets a ring around it, and its number beside it. */
  drawCulprits(ctx) {
    const named = this.ranks.rank.flatMap((rank, at) => (this.culprits.has(rank) ? [at] : []));
    for (const at of named) {
      if (this.grid.cellHeight >= 14) this.ring(ctx, at, "--page", 1.5, -4);
      this.ring(ctx, at, "--bad", this.grid.cellHeight >= 14 ? 3 : 2, this.grid.cellHeight >= 14 ? -1.5 : 1);
    }
    if (this.grid.cellHeight < 14) for (const at of named.slice(0, MOST_PINS)) this.pin(ctx, at);
  }

  pin(ctx, at) {
    const text = `rank ${this.ranks.rank[at]}`;
    ctx.font = `600 11px ${FONT}`;
    const width = ctx.measureText(text).width + 10;
    const isLeft = this.grid.x[at] + this.grid.cellWidth + 8 + width > this.grid.width;
    const x = isLeft ? this.grid.x[at] - 8 - width : this.grid.x[at] + this.grid.cellWidth + 8;
    const y = Math.max(0, Math.min(this.grid.height - 18, this.grid.y[at] + this.grid.cellHeight / 2 - 9));
    ctx.fillStyle = palette.get("--page");
    ctx.fillRect(x, y, width, 18);
    ctx.strokeStyle = ctx.fillStyle = palette.get("--bad");
    ctx.lineWidth = 1.5;
    ctx.strokeRect(x, y, width, 18);
    ctx.textAlign = "left";
    ctx.textBaseline = "middle";
    ctx.fillText(text, x + 5, y + 9.5);
  }

  drawLegend() {
    this.legend.replaceChildren();
    if (this.colourBy !== "state") {
      const steps = Array.from({ length: HEATS }, (_, at) => swatch(heat((at + 0.5) / HEATS)[0]));
      put(this.legend, [this.colourBy === "age" ? "0 ms " : "0 ", steps, ` ${this.valueText(this.scale)}`]);
      return;
    }
    const counts = new Map();
    for (let at = 0; at < this.size; at++) counts.set(this.state(at), (counts.get(this.state(at)) || 0) + 1);
    for (const [state, [letter, meaning]] of Object.entries(STATES)) {
      if (counts.has(state))
        this.legend.append(el("span", { class: "key" }, stateMark(state, letter), ` ${count(counts.get(state))} ${meaning}`));
    }
    if (this.culprits.size)
      this.legend.append(
        el(
          "span",
          { class: "key" },
          el("span", { class: "mark ringed", "aria-hidden": "true" }, "\u00a0"),
          " named by the verdict",
        ),
      );
  }

  /* -- pointer and keys --------------------------------------------------------------------------------------------- */

  listen() {
    this.frame.addEventListener("pointermove", (event) => this.hover(event));
    this.frame.addEventListener("pointerleave", () => tip.hide());
    this.frame.addEventListener("click", (event) => this.click(event));
    this.frame.addEventListener("keydown", (event) => this.key(event));
    this.frame.addEventListener("focus", () => this.draw());
    this.frame.addEventListener("blur", () => (tip.hide(), this.draw()));
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    return this.grid.at(event.clientX - box.left - MARGIN, event.clientY - box.top - MARGIN);
  }

  hover(event) {
    const at = this.at(event);
    if (at === null) tip.hide();
    else tip.show(this.lines(at), event.clientX, event.clientY);
  }

  lines(at) {
    const { ranks } = this;
    const number = ranks.last_number[at];
    const last = ranks.lasts[ranks.last[at]];
    const step = ranks.step[at];
    return [
      `rank ${ranks.rank[at]}: ${this.state(at)}${this.culprits.has(ranks.rank[at]) ? ", named by the verdict" : ""}`,
      (step === null ? "no step" : `step ${step}`) + (ranks.behind[at] ? `, ${plural(ranks.behind[at], "step")} behind` : ""),
      ranks.devices ? `CPU: ${ranks.places[ranks.place[at]]}` : ranks.places[ranks.place[at]] || "",
      devicePlace(ranks, at) ? `Device: ${devicePlace(ranks, at)}` : "",
      last ? `last: ${last}${number === null ? "" : ` #${number}`}` : "",
      ranks.hosts[ranks.host[at]] || "",
    ];
  }

  click(event) {
    const at = this.at(event);
    if (at !== null) this.select(at);
  }

  select(at) {
    this.selected = this.focused = at;
    this.draw();
    this.status.textContent = this.lines(at).map(inert).join(", ");
    this.onselect(at);
  }

  key(event) {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.select(this.focused);
    }
    if (event.key === "Escape") tip.hide();
    const to = this.grid.neighbour(this.focused, event.key);
    if (to === null) return;
    event.preventDefault();
    this.focused = to;
    this.draw();
    this.status.textContent = this.lines(to).map(inert).join(", ");
    this.pointOut(to);
  }

  pointOut(at) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [box.left + this.grid.x[at] + this.grid.cellWidth, box.top + this.grid.y[at] + this.grid.cellHeight];
    if (y < 60 || y > innerHeight - 40) window.scrollBy({ top: y - innerHeight / 2 });
    const moved = this.canvas.getBoundingClientRect().top - box.top;
    tip.show(this.lines(at), x, y + moved);
  }
}

/* The shape of a state, for cells of a few pixels. */
function drawShape(ctx, state, x, y, size) {
  const middle = size / 2;
  ctx.lineWidth = Math.max(1, size / 6);
  ctx.beginPath();
  if (state === "dead") {
    ctx.moveTo(x + 1, y + 1);
    ctx.lineTo(x + size - 1, y + size - 1);
    ctx.moveTo(x + size - 1, y + 1);
    ctx.lineTo(x + 1, y + size - 1);
  } else if (state === "stopped") {
    ctx.rect(x + size * 0.3, y + size * 0.3, size * 0.4, size * 0.4);
  } else if (state === "finished") {
    ctx.moveTo(x + size * 0.25, y + middle);
    ctx.lineTo(x + size * 0.75, y + middle);
  } else if (state === "running") {
    ctx.arc(x + middle, y + middle, size * 0.18, 0, 2 * Math.PI);
  }
  ctx.stroke();
}

function swatch(colour) {
  const box = el("span", { class: "swatch" });
  box.style.background = colour;
  return box;
}

function stateMark(state, letter) {
  return el("span", { class: `mark state-${state}`, "aria-hidden": "true" }, letter);
}
