// A canvas to draw on, and the drawing as the model reads it.

export const CELLS = 8; // the model reads 8 × 8 numbers from 0 (paper) to 1 (ink)

const ink = () => getComputedStyle(document.body).color;

/** What was drawn on a canvas; `changed` is called after every stroke. */
export class Pad {
  strokes = []; // lists of points, in the canvas's own pixels

  constructor(canvas, changed) {
    this.canvas = canvas;
    const place = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top].map((value) => (value * canvas.width) / box.width);
    };
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.strokes.push([place(event)]);
      this.show();
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!canvas.hasPointerCapture(event.pointerId) || !this.strokes.length) return;
      this.strokes.at(-1).push(place(event));
      this.show();
    });
    canvas.addEventListener("pointerup", changed);
  }

  get empty() {
    return !this.strokes.length;
  }

  clear() {
    this.strokes = [];
    this.show();
  }

  show() {
    const context = this.canvas.getContext("2d");
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.#draw(context, 36, (point) => point);
  }

  /** What the model was trained on: the digit fills a bitmap of 32 × 32; each number is the share of ink in 4 × 4 of it. */
  pixels() {
    const [xs, ys] = [0, 1].map((axis) => this.strokes.flat().map((point) => point[axis]));
    const middle = [xs, ys].map((all) => (Math.min(...all) + Math.max(...all)) / 2);
    const size = Math.max(Math.max(...xs) - Math.min(...xs), Math.max(...ys) - Math.min(...ys), 1);
    const context = new OffscreenCanvas(4 * CELLS, 4 * CELLS).getContext("2d", { willReadFrequently: true });
    this.#draw(context, 4.5, (point) => point.map((value, axis) => 16 + ((value - middle[axis]) * 27) / size));
    const { data } = context.getImageData(0, 0, 4 * CELLS, 4 * CELLS);
    const cells = new Float32Array(CELLS * CELLS);
    for (let i = 0; i < data.length / 4; i++) // the bitmap is black or white: more than half covered is ink
      if (data[4 * i + 3] > 127) cells[Math.floor(i / 128) * CELLS + Math.floor((i % 32) / 4)] += 1 / 16;
    return cells;
  }

  #draw(context, lineWidth, place) {
    Object.assign(context, { lineWidth, lineCap: "round", lineJoin: "round", strokeStyle: ink() });
    for (const stroke of this.strokes) {
      context.beginPath();
      for (const point of [stroke[0], ...stroke]) context.lineTo(...place(point)); // twice the first: a dot is a line, too
      context.stroke();
    }
  }
}

/** A small picture of what the model reads. */
export function thumbnail(pixels) {
  const canvas = Object.assign(document.createElement("canvas"), { width: CELLS, height: CELLS });
  const context = canvas.getContext("2d");
  context.fillStyle = ink();
  pixels.forEach((share, at) => {
    context.globalAlpha = share;
    context.fillRect(at % CELLS, Math.floor(at / CELLS), 1, 1);
  });
  return canvas;
}
