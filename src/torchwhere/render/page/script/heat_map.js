/* A heat map: rows by columns, darker is more. For the pointer, for keys (arrows) and, through its status line, for the ear.
 *
 * Takes {label, rows, columns, value(row, column) or null, rowLabel, columnLabel, describe(row, column) lines, isFlagged(row),
 * isMarked(column), format(value), fromLeast, leastMost}. What is over four times the 90th percentile shares the last colour: one compile
 * must not hide the rest. */

const GUTTER = 92;
const FLAG = "\u25b8";

class HeatMap {
  constructor(options) {
    Object.assign(
      this,
      { rowLabel: String, columnLabel: String, isFlagged: () => false, isMarked: () => false, format: duration },
      options,
    );
    this.at = null;
    this.rescale();
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.status = liveRegion();
    this.frame = el(
      "div",
      {
        class: "heatmap",
        tabindex: "0",
        role: "application",
        "aria-roledescription": "heat map",
        "aria-label": `${options.label}. Arrow keys move.`,
      },
      this.canvas,
      this.status,
    );
    this.legend = el("p", { class: "legend" });
    this.element = el("div", {}, this.frame, this.legend);
    this.listen();
    keptDrawn(this.frame, (width) => this.draw(width));
  }

  rescale() {
    const all = [];
    for (let row = 0; row < this.rows; row++) {
      for (let column = 0; column < this.columns; column++) {
        const value = this.value(row, column);
        if (value !== null && value !== undefined) all.push(value);
      }
    }
    all.sort((a, b) => a - b);
    const [first, last, high] = all.length ? [all[0], all[all.length - 1], all[Math.floor(0.9 * (all.length - 1))]] : [0, 0, 0];
    this.least = this.fromLeast ? first : Math.min(0, first);
    this.most = Math.min(last, 4 * high || last);
    this.isCut = this.most < last;
    this.most = Math.max(this.most, this.fromLeast ? 1.3 * first : this.leastMost || 0); // noise is not to look like news
    this.known = all.length;
  }

  draw(width) {
    this.width = width;
    const room = width - GUTTER - 2;
    this.cellWidth = Math.min(56, room / this.columns);
    this.cellHeight = Math.max(3, Math.min(20, 420 / this.rows));
    const height = Math.ceil(this.rows * this.cellHeight) + 18;
    const pen = sized(this.canvas, width, height);
    pen.font = `11px ${FONT}`;
    pen.textBaseline = "middle";
    for (let row = 0; row < this.rows; row++) this.drawRow(pen, row);
    this.drawRowLabels(pen);
    this.drawColumnLabels(pen);
    if (this.at) this.outline(pen, ...this.at);
    this.drawLegend();
  }

  drawRow(pen, row) {
    const gap = this.cellWidth > 6 ? 1 : 0;
    const down = this.cellHeight > 5 ? 1 : 0;
    const y = row * this.cellHeight;
    for (let column = 0; column < this.columns; column++) {
      const x = GUTTER + column * this.cellWidth;
      const value = this.value(row, column);
      if (value === null || value === undefined) {
        hatch(pen, x, y, this.cellWidth - gap, this.cellHeight - down);
        if (this.hasRoom()) this.write(pen, "none", palette.get("--text"), x, y, palette.get("--page"));
        continue;
      }
      const [fill, text] = heat(this.part(value));
      pen.fillStyle = fill;
      pen.fillRect(x, y, this.cellWidth - gap, this.cellHeight - down);
      if (this.hasRoom()) this.write(pen, this.format(value), text, x, y);
    }
  }

  hasRoom() {
    return this.cellWidth >= 46 && this.cellHeight >= 14;
  }

  write(pen, text, colour, x, y, behind = null) {
    pen.textAlign = "center";
    if (behind) {
      const width = pen.measureText(text).width + 4;
      pen.fillStyle = behind;
      pen.fillRect(x + (this.cellWidth - width) / 2, y + 2, width, this.cellHeight - 5);
    }
    pen.fillStyle = colour;
    pen.fillText(text, x + this.cellWidth / 2, y + this.cellHeight / 2, this.cellWidth - 4);
  }

  drawRowLabels(pen) {
    pen.textAlign = "right";
    for (const [row, isFlagged] of spaced(this.rows, 15 / this.cellHeight, this.isFlagged)) {
      pen.fillStyle = palette.get(isFlagged ? "--text" : "--muted");
      pen.font = `${isFlagged ? "600 " : ""}11px ${FONT}`;
      const text = (isFlagged ? `${FLAG} ` : "") + inert(this.rowLabel(row));
      pen.fillText(fitText(pen, text, GUTTER - 8), GUTTER - 6, Math.max(6, (row + 0.5) * this.cellHeight));
    }
    pen.font = `11px ${FONT}`;
  }

  drawColumnLabels(pen) {
    const texts = [0, this.columns - 1].map((column) => pen.measureText(`\u25b2 ${inert(this.columnLabel(column))}`).width);
    const room = Math.min(140, Math.max(...texts) + 6);
    pen.textAlign = "center";
    for (const [column, isMarked] of spaced(this.columns, room / this.cellWidth, this.isMarked)) {
      const text = fitText(pen, (isMarked ? "\u25b2 " : "") + inert(this.columnLabel(column)), room);
      const half = pen.measureText(text).width / 2;
      const x = Math.min(this.width - half - 1, GUTTER + (column + 0.5) * this.cellWidth);
      pen.fillStyle = palette.get(isMarked ? "--warn" : "--muted");
      pen.fillText(text, x, this.rows * this.cellHeight + 10);
    }
  }

  part(value) {
    return this.most > this.least ? (value - this.least) / (this.most - this.least) : 0;
  }

  drawLegend() {
    const steps = Array.from({ length: HEATS }, (_, at) => {
      const box = el("span", { class: "swatch" });
      box.style.background = heat((at + 0.5) / HEATS)[0];
      return box;
    });
    const unknown =
      this.known < this.rows * this.columns ? [el("span", { class: "swatch hatched" }), this.absent || "not recorded"] : [];
    this.legend.replaceChildren();
    put(this.legend, [
      this.format(this.least) || "0",
      " ",
      steps,
      " ",
      this.format(this.most),
      this.isCut ? " and more " : " ",
      unknown,
      this.hint ? ` ${this.hint}` : "",
    ]);
  }

  outline(pen, row, column) {
    pen.strokeStyle = palette.get("--focus");
    pen.lineWidth = 2;
    pen.strokeRect(
      GUTTER + column * this.cellWidth - 0.5,
      row * this.cellHeight - 0.5,
      this.cellWidth,
      Math.max(3, this.cellHeight),
    );
  }

  listen() {
    this.frame.addEventListener("pointermove", (event) => this.hover(event));
    this.frame.addEventListener("pointerleave", () => tip.hide());
    this.frame.addEventListener("blur", () => tip.hide());
    this.frame.addEventListener("keydown", (event) => this.key(event));
  }

  hover(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - GUTTER) / this.cellWidth);
    const row = Math.floor((event.clientY - box.top) / this.cellHeight);
    if (row < 0 || row >= this.rows || column < 0 || column >= this.columns) tip.hide();
    else tip.show(this.describe(row, column), event.clientX, event.clientY);
  }

  key(event) {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (event.key === "Escape") tip.hide();
    if (!move) return;
    event.preventDefault();
    const [row, column] = this.at ? [this.at[0] + move[0], this.at[1] + move[1]] : [0, this.columns - 1];
    this.at = [Math.max(0, Math.min(this.rows - 1, row)), Math.max(0, Math.min(this.columns - 1, column))];
    this.draw(this.width);
    const box = this.canvas.getBoundingClientRect();
    const said = this.describe(...this.at);
    tip.show(said, box.left + GUTTER + (this.at[1] + 1) * this.cellWidth, box.top + (this.at[0] + 1) * this.cellHeight);
    this.status.textContent = said.map(inert).join(", ");
  }
}

/* Which of so many get a label, if labels must be `apart`: those that are marked first, then others where there is room. */
function spaced(size, apart, isMarked) {
  const found = [];
  const isFree = (at) => found.every(([other]) => Math.abs(other - at) >= apart);
  for (let at = size - 1; at >= 0; at--) if (isMarked(at) && isFree(at)) found.push([at, true]);
  for (let at = 0; at < size; at += Math.max(1, Math.ceil(apart))) if (isFree(at)) found.push([at, false]);
  return found;
}
