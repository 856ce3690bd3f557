/* The colours of the style sheet, for canvases; asked again whenever the theme changes. */

const palette = {
  colours: {},
  listeners: [],
  get(variable) {
    if (!(variable in this.colours)) {
      const probe = document.body.appendChild(el("i", { hidden: true }));
      probe.style.color = `var(${variable})`;
      this.colours[variable] = getComputedStyle(probe).color;
      probe.remove();
    }
    return this.colours[variable];
  },
  changed() {
    this.colours = {};
    for (const listener of this.listeners) listener();
  },
};

const HEATS = 7;

/* The colour of a share of the most, 0 to 1, and of the text on it. */
function heat(part) {
  const at = Math.max(0, Math.min(HEATS - 1, Math.floor(part * HEATS)));
  return [palette.get(`--heat-${at}`), palette.get(at * 2 < HEATS ? "--heat-text-low" : "--heat-text-high")];
}

/* A canvas as large as it is said to be, in the pixels of the screen. */
function sized(canvas, width, height) {
  const ratio = Math.min(3, window.devicePixelRatio || 1);
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

function fitText(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let low = 0;
  let high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (pen.measureText(text.slice(0, middle) + "\u2026").width <= width) low = middle;
    else high = middle - 1;
  }
  return low ? text.slice(0, low) + "\u2026" : "";
}

/* Not known, not arrived: stripes, which no colour can be taken for. */
function hatch(pen, x, y, width, height) {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, width, height);
  pen.clip();
  pen.strokeStyle = palette.get("--hatch");
  pen.lineWidth = 1;
  pen.beginPath();
  for (let at = x - height; at < x + width; at += 4) {
    pen.moveTo(at, y + height);
    pen.lineTo(at + height, y);
  }
  pen.stroke();
  pen.restore();
}

const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif';

/* Draws again when the place it has changes its width, and when the theme changes. */
function keptDrawn(frame, draw) {
  let width = 0;
  new ResizeObserver(([{ contentRect }]) => {
    const now = Math.floor(contentRect.width);
    if (now && now !== width) draw((width = now));
  }).observe(frame);
  palette.listeners.push(() => width && draw(width));
}
