// The block map: rows of blocks, their owners, and a canvas that draws a cell for each block.

const STATES = ["free", "used", "shared", "cached"];
const NAMES = ["free", "used", "shared", "cached", "reserved", "swapped"];
const HEIGHT = 420; // most pixels of the grid, unless cells would be too small to see
const FREE = 0;

export class BlockMap {
  // rows[block] = [block, state, references, tokens, ...keys of owners]; undefined: free
  constructor(grid, canvas, detail, legend, nameOf) {
    Object.assign(this, { grid, canvas, detail, legend, nameOf });
    this.context = canvas.getContext("2d", { alpha: false });
    this.header = { blocks: 0, block_size: 0, swap_blocks: 0 };
    this.state = { counts: {}, reserved: 0, swapped: 0 };
    this.rows = [];
    this.colours = [];
    this.drawn = new Int8Array(0); // the colour that each cell has, -1: none
    this.cursor = -1;
    this.numbers = {};
    for (const name of NAMES) this.addToLegend(name);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    new ResizeObserver(() => this.resize()).observe(grid);
    grid.addEventListener("keydown", (event) => this.key(event));
    grid.addEventListener("focus", () => this.select(Math.max(0, this.cursor)));
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerdown", (event) => this.point(event));
  }

  start(header) {
    this.header = header;
    this.rows = new Array(header.blocks);
    this.resize();
  }

  // data: of an event snapshot (whole) or delta
  update(data, whole) {
    if (whole) this.rows = new Array(this.header.blocks);
    for (const row of data.blocks) this.rows[row[0]] = row[1] === FREE ? undefined : row;
    this.state = data;
    this.draw();
    this.count();
    this.refresh();
  }

  // Describe the block under the cursor again, after its owner or its state may have changed.
  refresh() {
    if (this.cursor >= 0) this.describe("off");
  }

  // number of each colour in NAMES that the grid shows; reserved blocks are the first free, then cached ones
  *looks() {
    let reserved = this.state.reserved;
    let fromCached = Math.max(0, reserved - (this.state.counts.free ?? 0));
    for (let block = 0; block < this.header.blocks; block++) {
      const state = this.rows[block] ? this.rows[block][1] : FREE;
      if (state === FREE && reserved > 0) {
        reserved--;
        yield 4;
      } else if (state === 3 && fromCached > 0) {
        fromCached--;
        yield 4;
      } else yield state;
    }
    for (let block = 0; block < this.header.swap_blocks; block++) yield block < this.state.swapped ? 5 : FREE;
  }

  resize() {
    const { blocks, swap_blocks } = this.header;
    const width = Math.floor(this.grid.clientWidth);
    if (!blocks || !width) return;
    let size = 24;
    const height = (cell) => {
      const columns = Math.max(1, Math.floor(width / cell));
      return (Math.ceil(blocks / columns) + Math.ceil(swap_blocks / columns)) * cell;
    };
    while (size > 4 && height(size) > HEIGHT) size--;
    this.cell = size;
    this.columns = Math.max(1, Math.floor(width / size));
    this.swapRow = Math.ceil(blocks / this.columns);
    const rows = this.swapRow + Math.ceil(swap_blocks / this.columns);
    const scale = window.devicePixelRatio || 1;
    const gap = swap_blocks ? 8 : 0;
    this.canvas.width = Math.round(this.columns * size * scale);
    this.canvas.height = Math.round((rows * size + gap) * scale);
    this.canvas.style.width = `${this.columns * size}px`;
    this.canvas.style.height = `${rows * size + gap}px`;
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    this.redraw();
  }

  redraw() {
    const style = getComputedStyle(document.documentElement);
    this.colours = NAMES.map((name) => style.getPropertyValue(`--${name}`).trim());
    this.panel = style.getPropertyValue("--panel").trim();
    this.mark = style.getPropertyValue("--cursor").trim();
    this.drawn = new Int8Array(this.header.blocks + this.header.swap_blocks).fill(-1);
    this.context.fillStyle = this.panel;
    this.context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    this.draw();
  }

  // Draw the cells whose colour has changed.
  draw() {
    if (!this.columns) return;
    let cell = 0;
    for (const look of this.looks()) {
      if (this.drawn[cell] !== look) this.fill(cell, look);
      cell++;
    }
    if (this.cursor >= 0) this.outline();
  }

  place(cell) {
    const { blocks } = this.header;
    const number = cell < blocks ? cell : cell - blocks;
    const row = Math.floor(number / this.columns) + (cell < blocks ? 0 : this.swapRow);
    const top = row * this.cell + (cell < blocks ? 0 : 8);
    return [(number % this.columns) * this.cell, top];
  }

  fill(cell, look) {
    const [left, top] = this.place(cell);
    const context = this.context;
    context.fillStyle = this.panel;
    context.fillRect(left, top, this.cell, this.cell);
    context.fillStyle = this.colours[look];
    context.fillRect(left, top, this.cell - 1, this.cell - 1);
    this.drawn[cell] = look;
  }

  outline() {
    const [left, top] = this.place(this.cursor);
    this.context.strokeStyle = this.mark;
    this.context.lineWidth = 1;
    this.context.strokeRect(left + 0.5, top + 0.5, this.cell - 2, this.cell - 2);
  }

  addToLegend(name) {
    const item = document.createElement("li");
    const swatch = document.createElement("span");
    swatch.className = `swatch ${name === "cached" ? "cached-block" : name}`;
    const number = document.createElement("b");
    item.append(swatch, `${name} `, number);
    this.legend.append(item);
    this.numbers[name] = number;
    if (name === "swapped") this.swappedItem = item;
  }

  count() {
    const { counts, reserved, swapped } = this.state;
    for (const name of STATES) this.set(name, counts[name]);
    this.set("reserved", reserved);
    this.set("swapped", swapped);
    this.swappedItem.hidden = !this.header.swap_blocks;
  }

  set(name, value) {
    const text = String(value);
    if (this.numbers[name].textContent !== text) this.numbers[name].textContent = text;
  }

  point(event) {
    const size = this.cell;
    const column = Math.floor(event.offsetX / size);
    const block = Math.floor(event.offsetY / size) * this.columns + column;
    if (column < this.columns && block < this.header.blocks) this.select(block);
  }

  key(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns };
    const last = this.header.blocks - 1;
    let to;
    if (event.key in steps) to = this.cursor + steps[event.key];
    else if (event.key === "Home") to = 0;
    else if (event.key === "End") to = last;
    else return;
    event.preventDefault();
    if (to >= 0 && to <= last) this.select(to);
  }

  select(block) {
    if (!this.columns || block === this.cursor) return;
    const before = this.cursor;
    this.cursor = block;
    if (before >= 0) this.fill(before, this.drawn[before]);
    this.outline();
    this.describe();
  }

  // live: "polite" lets screen readers speak the text; they do not when a step has changed it
  describe(live = "polite") {
    const text = this.text(this.cursor);
    this.detail.setAttribute("aria-live", live);
    if (this.detail.textContent !== text) this.detail.textContent = text;
  }

  text(block) {
    const row = this.rows[block];
    if (!row) return `Block ${block}: free`;
    const [, state, references, tokens, ...keys] = row;
    const owners = keys.map((key) => this.nameOf(key)).join(", ");
    const of = `${tokens} of ${this.header.block_size} tokens`;
    if (!references) return `Block ${block}: cached, ${of}, no owner`;
    const times = references === 1 ? "1 reference" : `${references} references`;
    return `Block ${block}: ${STATES[state]}, ${times}, ${of}, owner: ${owners}`;
  }

  // Fill a table with ranges of alike blocks, the canvas in text.
  fillTable(body, most = 400) {
    const lines = [];
    let begin = 0;
    const alike = (block) => JSON.stringify((this.rows[block] ?? [block, FREE, 0, 0]).slice(1));
    for (let block = 1; block <= this.header.blocks && lines.length < most; block++) {
      if (block < this.header.blocks && alike(block) === alike(begin)) continue;
      const [, state, references, tokens, ...keys] = this.rows[begin] ?? [begin, FREE, 0, 0];
      const numbers = block - 1 > begin ? `${begin} to ${block - 1}` : `${begin}`;
      lines.push([numbers, STATES[state], references, tokens, keys.map((key) => this.nameOf(key)).join(", ")]);
      begin = block;
    }
    if (begin < this.header.blocks) lines.push([`${begin} and later`, "not listed", "", "", ""]);
    fillRows(body, lines);
  }
}

// Set the text of a table's cells; rows are reused, so that a reader keeps its place.
export function fillRows(body, lines) {
  while (body.rows.length > lines.length) body.deleteRow(-1);
  lines.forEach((line, number) => {
    const row = body.rows[number] ?? body.insertRow();
    line.forEach((value, column) => {
      const cell = row.cells[column] ?? row.insertCell();
      const text = String(value);
      if (cell.textContent !== text) cell.textContent = text;
    });
  });
}
