'use strict';
// The charts. All share one range of steps; each draws only visible items and merges those smaller than a pixel.

const view = { from: 0, to: Math.max(plan.steps, 1), selected: null, hovered: null, matches: null, box: null };
const charts = [];
let palette = {};

function readPalette() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  palette = Object.fromEntries(['paper', 'ink', 'quiet', 'line', 'panel', 'field', 'focus', 'lane', 'lane-line', 'copy']
    .map((name) => [name, colour(name)]));
  const shade = (hex, alpha) => {
    const part = (at) => parseInt(hex.slice(at, at + 2), 16);
    return `rgba(${part(1)}, ${part(3)}, ${part(5)}, ${alpha})`;
  };
  const tints = [0.95, 0.78, 0.62];
  palette.usages = USAGES.map(({ key }) => tints.map((alpha) => shade(colour(key), alpha)));
  // Text colours with enough contrast on each tint.
  const light = (hex) => [1, 3, 5].reduce((sum, at, k) => sum + parseInt(hex.slice(at, at + 2), 16) * [0.3, 0.59, 0.11][k], 0);
  palette.onUsages = USAGES.map(({ key }) => tints.map((alpha) => {
    const ground = light(colour(key)) * alpha + light(palette.paper) * (1 - alpha);
    return ground > 115 ? '#0d1117' : '#ffffff';
  }));
  palette.faint = USAGES.map(({ key }) => shade(colour(key), 0.12));
  palette.band = shade(palette['lane-line'], 0.09);
}

const sameItem = (a, b) => !!a && !!b && a.type === b.type && a.index === b.index;

/** The text, shortened to a width. */
function fitted(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let length = Math.floor(width / 6.2);
  while (length > 1 && context.measureText(`${text.slice(0, length)}…`).width > width) length -= 1;
  return length > 1 ? `${text.slice(0, length)}…` : '';
}

/** About this many round numbers between two values. */
function ticks(from, to, about, power) {
  const raw = (to - from) / Math.max(about, 1);
  let step = 1;
  if (power) {
    step = 2 ** Math.max(0, Math.ceil(Math.log2(raw)));
  } else {
    const ten = 10 ** Math.max(0, Math.floor(Math.log10(raw)));
    step = [1, 2, 5, 10].map((factor) => factor * ten).find((size) => size >= raw) || ten * 10;
  }
  const all = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) all.push(at);
  return all;
}

class Chart {
  constructor(parent, height, label, className) {
    const holder = element('div', undefined, parent, 'chart');
    this.canvas = element('canvas', undefined, holder, className);
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute('role', 'application');
    this.canvas.setAttribute('aria-label', `${label}. Arrow keys move, Enter shows details.`);
    this.height = height;
    this.left = 58;
    this.items = [];
    charts.push(this);
  }

  get width() {
    return this.canvas.clientWidth;
  }

  get plotWidth() {
    return Math.max(this.width - this.left - 8, 10);
  }

  x(step) {
    return this.left + ((step - view.from) / (view.to - view.from)) * this.plotWidth;
  }

  stepAt(x) {
    return view.from + ((x - this.left) / this.plotWidth) * (view.to - view.from);
  }

  begin() {
    const ratio = window.devicePixelRatio || 1;
    const wide = Math.round(this.width * ratio);
    const high = Math.round(this.height * ratio);
    if (this.canvas.width !== wide || this.canvas.height !== high) {
      this.canvas.width = wide;
      this.canvas.height = high;
      this.canvas.style.height = `${this.height}px`;
    }
    const context = this.canvas.getContext('2d');
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    context.font = '12px system-ui, sans-serif';
    context.textBaseline = 'middle';
    return context;
  }

  /** The zoom rectangle while dragging. */
  drawBox(context) {
    if (!view.box || view.box.chart !== this) return;
    const { x0, y0, x1, y1 } = view.box;
    context.strokeStyle = palette.focus;
    context.setLineDash([4, 3]);
    context.strokeRect(Math.min(x0, x1), Math.min(y0, y1), Math.abs(x1 - x0), Math.abs(y1 - y0));
    context.setLineDash([]);
  }

  drawSteps(context, y, taken) {
    context.fillStyle = palette.quiet;
    context.textAlign = 'center';
    for (const step of ticks(view.from, view.to, this.plotWidth / 90, false)) {
      const x = this.x(step);
      const covered = taken && x > taken[0] - 26 && x < taken[1] + 26;
      if (x > this.left + this.plotWidth - 12 || covered) continue;
      context.fillText(step === 0 ? 'step 0' : String(step), Math.max(x, this.left + 16), y);
    }
    context.textAlign = 'left';
  }
}

/** One lane per backend: splits as blocks, copies as arrows. */
class Lanes extends Chart {
  constructor(parent) {
    const lane = 88;
    super(parent, plan.backends.length * lane + 22, 'Splits and copies over steps, one lane per device');
    this.lane = lane;
    this.items = plan.splits.map((_, index) => ({ type: 'split', index }))
      .concat(arrows.map((_, index) => ({ type: 'arrow', index })));
    this.items.sort((a, b) => this.time(a) - this.time(b) || (a.type < b.type ? -1 : 1));
    this.canvas.dataset.blocks = plan.splits.length;
    this.canvas.dataset.copies = plan.copies.length;
  }

  time(item) {
    return item.type === 'split' ? plan.splits[item.index].first : plan.splits[arrows[item.index].reader].first - 0.5;
  }

  top(backend) {
    return backend * this.lane + 10;
  }

  rectangle(item) {
    if (item.type === 'arrow') {
      const { x0, y0, x1, y1 } = this.curve(arrows[item.index]);
      return [Math.min(x0, x1) - 4, Math.min(y0, y1), Math.abs(x1 - x0) + 8, Math.abs(y1 - y0)];
    }
    const split = plan.splits[item.index];
    const [from, to] = this.block(split);
    return [from, this.top(split.backend), to - from, 60];
  }

  /** The horizontal range of a block; with few splits at least 5 pixels wide. */
  block(split) {
    const minimum = plan.splits.length > 60 ? 1 : 5;
    let from = this.x(split.first);
    if (split.last + 1 >= plan.steps - 2) from = Math.min(from, this.x(plan.steps) - minimum);
    return [from, Math.max(this.x(split.last + 1), from + minimum)];
  }

  curve(arrow) {
    const reader = plan.splits[arrow.reader];
    const source = arrow.source === null ? null : plan.splits[arrow.source];
    const down = arrow.from < reader.backend;
    // From near the end of the source's block to near the start of the reader's.
    const [from, to] = this.block(reader);
    // Data that exists before the run has no source split: the arrow is vertical.
    const straight = Math.min(from + 6, (from + to) / 2) + 5;
    return {
      x0: source ? Math.max(this.block(source)[1] - 6, (this.block(source)[0] + this.block(source)[1]) / 2) : straight,
      y0: this.top(arrow.from) + (down ? 60 : 0),
      x1: source ? Math.min(from + 6, (from + to) / 2) : straight,
      y1: this.top(reader.backend) + (down ? 0 : 60),
    };
  }

  draw() {
    const context = this.begin();
    plan.backends.forEach((backend, index) => {
      const y = this.top(index);
      context.fillStyle = palette.field;
      context.fillRect(this.left, y - 4, this.plotWidth, 68);
      context.fillStyle = palette.ink;
      context.font = '600 13px system-ui, sans-serif';
      context.fillText(fitted(context, backend.backend, this.left - 6), 0, y + 30);
      context.font = '12px system-ui, sans-serif';
    });
    context.save();
    context.beginPath();
    context.rect(this.left - 1, 0, this.plotWidth + 9, this.height);
    context.clip();
    let lastPixel = new Array(plan.backends.length).fill(-1);
    for (const item of this.items) {
      if (item.type === 'split') this.drawSplit(context, item, lastPixel);
    }
    for (const item of this.items) {
      if (item.type === 'arrow') this.drawArrow(context, item);
    }
    context.restore();
    this.drawSteps(context, this.height - 9);
    this.drawBox(context);
  }

  drawSplit(context, item, lastPixel) {
    const split = plan.splits[item.index];
    const [x, y, w, h] = this.rectangle(item);
    if (x + w < this.left || x > this.left + this.plotWidth) return;
    // Of several splits within a pixel only the first is drawn.
    if (w <= 2 && Math.round(x) === lastPixel[split.backend] && !sameItem(item, view.selected)) return;
    lastPixel[split.backend] = Math.round(x);
    context.fillStyle = palette.lane;
    context.fillRect(x, y, w, h);
    const marked = sameItem(item, view.selected) || sameItem(item, view.hovered);
    context.strokeStyle = marked ? palette.focus : palette['lane-line'];
    context.lineWidth = marked ? 2 : 1;
    if (w > 3) context.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
    const from = Math.max(x, this.left);
    const room = Math.min(x + w, this.left + this.plotWidth) - from - 12;
    if (room < 14) return;
    context.fillStyle = palette.ink;
    context.font = '600 13px system-ui, sans-serif';
    const name = room > 60 ? `split ${item.index}` : String(item.index);
    context.fillText(fitted(context, room > 230 ? `split ${item.index}: ${split.label}` : name, room), from + 7, y + 14);
    context.font = '12px system-ui, sans-serif';
    context.fillStyle = palette.quiet;
    const lines = room > 230
      ? [`${plural(split.node_count, 'node', 'nodes')}, ${bytesText(split.traffic)} memory traffic`, `≈ ${secondsText(split.seconds)}`]
      : [split.label, `${plural(split.node_count, 'node', 'nodes')}, ${bytesText(split.traffic)}, ≈ ${secondsText(split.seconds)}`];
    lines.forEach((line, at) => context.fillText(fitted(context, line, room), from + 7, y + 32 + at * 16));
  }

  drawArrow(context, item) {
    const arrow = arrows[item.index];
    const { x0, y0, x1, y1 } = this.curve(arrow);
    if (Math.max(x0, x1) < this.left || Math.min(x0, x1) > this.left + this.plotWidth) return;
    const marked = sameItem(item, view.selected) || sameItem(item, view.hovered);
    context.strokeStyle = marked ? palette.focus : palette.copy;
    context.fillStyle = context.strokeStyle;
    context.lineWidth = marked ? 2.5 : 1.6;
    const middle = (y0 + y1) / 2;
    context.beginPath();
    context.moveTo(x0, y0);
    context.bezierCurveTo(x0, middle, x1, middle, x1, y1);
    context.stroke();
    const down = Math.sign(y1 - y0);
    context.beginPath();
    context.moveTo(x1, y1);
    context.lineTo(x1 - 4, y1 - 7 * down);
    context.lineTo(x1 + 4, y1 - 7 * down);
    context.fill();
    if (arrows.length > this.plotWidth / 60) return;
    const many = arrow.copies.length > 1 ? `${arrow.copies.length} copies, ` : 'copy of ';
    const text = `${this.plotWidth > 420 ? many : ''}${bytesText(arrow.bytes)}`;
    const wide = context.measureText(text).width;
    const right = Math.max(x0, x1) + 10 + wide < this.left + this.plotWidth;
    context.textAlign = right ? 'left' : 'right';
    context.fillText(text, right ? Math.max(x0, x1) + 10 : Math.min(x0, x1) - 10, middle);
    context.textAlign = 'left';
  }

  hit(px, py) {
    for (const item of this.items) {
      if (item.type !== 'arrow') continue;
      const { x0, y0, x1, y1 } = this.curve(arrows[item.index]);
      const inside = py > Math.min(y0, y1) && py < Math.max(y0, y1);
      if (inside && px > Math.min(x0, x1) - 7 && px < Math.max(x0, x1) + 7) return item;
    }
    return this.items.findLast((item) => {
      if (item.type !== 'split') return false;
      const [x, y, w, h] = this.rectangle(item);
      return px >= x - 1 && px <= x + w + 1 && py >= y && py <= y + h;
    }) || null;
  }
}

/** The memory map of one buffer of a backend's arena: address over steps. */
class MemoryMap extends Chart {
  constructor(parent, backend, chunk) {
    const size = plan.backends[backend].chunks[chunk];
    super(parent, 300, `Compute buffer of ${plan.backends[backend].backend}, ${bytesText(size)}: address over steps`);
    this.backend = backend;
    this.chunk = chunk;
    this.size = size;
    this.low = 0;
    this.high = size;
    const own = [];
    for (let s = 0; s < storageCount; s += 1) if (S.backend[s] === backend && S.chunk[s] === chunk) own.push(s);
    own.sort((a, b) => S.start[a] - S.start[b] || S.offset[a] - S.offset[b]);
    this.items = own.map((index) => ({ type: 'storage', index }));
    this.storages = Uint32Array.from(own);
    this.canvas.dataset.rectangles = own.length;
  }

  get top() {
    return 22;
  }

  get plotHeight() {
    return this.height - this.top - 20;
  }

  y(address) {
    return this.top + (1 - (address - this.low) / Math.max(this.high - this.low, 1)) * this.plotHeight;
  }

  addressAt(y) {
    return this.low + (1 - (y - this.top) / this.plotHeight) * (this.high - this.low);
  }

  rectangle(item) {
    const s = item.index;
    const x = this.x(S.start[s]);
    const y = this.y(S.offset[s] + S.bytes[s]);
    return [x, y, this.x(S.end[s]) - x, this.y(S.offset[s]) - y];
  }

  draw() {
    const context = this.begin();
    const { left, top, plotWidth, plotHeight } = this;
    context.fillStyle = palette.field;
    context.fillRect(left, top, plotWidth, plotHeight);
    context.save();
    context.beginPath();
    context.rect(left, 0, plotWidth, top + plotHeight);
    context.clip();
    this.drawBands(context);
    this.drawRectangles(context);
    context.restore();
    this.drawSteps(context, this.height - 9, this.peakLabel(context));
    this.drawLines(context);
    this.drawBox(context);
  }

  /** Shades the steps in which the backend computes. */
  drawBands(context) {
    context.fillStyle = palette.band;
    let last = -1;
    plan.splits.forEach((split, index) => {
      if (split.backend !== this.backend) return;
      const x = this.x(split.first);
      const w = this.x(split.last + 1) - x;
      if (x + w < this.left || x > this.left + this.plotWidth || (w < 1 && Math.round(x) === last)) return;
      last = Math.round(x);
      context.fillRect(x, this.top, Math.max(w, 1), this.plotHeight);
      const from = Math.max(x, this.left) + 4;
      if (w > 60 && from + 60 < this.left + this.plotWidth - context.measureText(this.sizeText()).width) {
        context.save();
        context.fillStyle = palette.quiet;
        context.fillText(`split ${index}`, from, 10);
        context.restore();
      }
    });
  }

  drawRectangles(context) {
    const { left, plotWidth, top, plotHeight } = this;
    const right = left + plotWidth;
    // Of thin rectangles that look the same only the first is drawn.
    const seen = new Set();
    let painted = 0;
    let merged = 0;
    let style = '';
    context.lineWidth = 1;
    const names = [];
    for (const s of this.storages) {
      const x = this.x(S.start[s]);
      const x2 = this.x(S.end[s]);
      if (x2 < left || x > right) continue;
      const y = this.y(S.offset[s] + S.bytes[s]);
      const y2 = this.y(S.offset[s]);
      if (y2 < top || y > top + plotHeight) continue;
      const w = Math.max(x2 - x, 1);
      const h = Math.max(y2 - y, 1);
      const lit = !view.matches || view.matches[s];
      const usage = S.usage[s];
      if (w < 2 || h < 2) {
        const appearance = ((Math.round(x) * 4096 + Math.round(w)) * 4096 + Math.round(Math.max(y, 0))) * 4096 + Math.round(h);
        const key = appearance * 16 + usage * 2 + (lit ? 1 : 0);
        if (seen.has(key)) {
          merged += 1;
          continue;
        }
        seen.add(key);
      }
      const next = lit ? palette.usages[usage][s % 3] : palette.faint[usage];
      if (next !== style) {
        style = next;
        context.fillStyle = next;
      }
      context.fillRect(x, y, w, h);
      painted += 1;
      if (w > 4 && h > 4) {
        context.strokeStyle = palette.paper;
        context.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
        if (w > 74 && h > 15 && lit && names.length < 200) names.push([s, x, y, w, h]);
      }
    }
    for (const [s, x, y, w, h] of names) {
      context.fillStyle = palette.onUsages[S.usage[s]][s % 3];
      const from = Math.max(x, left);
      const room = Math.min(x + w, right) - from - 10;
      if (room > 50) context.fillText(fitted(context, `${T[S.name[s]]} ${bytesText(S.bytes[s])}`, room), from + 5, y + h / 2);
    }
    for (const item of [view.hovered, view.selected]) {
      if (!item || item.type !== 'storage' || S.backend[item.index] !== this.backend || S.chunk[item.index] !== this.chunk) continue;
      const [x, y, w, h] = this.rectangle(item);
      context.strokeStyle = palette.focus;
      context.lineWidth = 2;
      context.strokeRect(x - 1, y - 1, Math.max(w, 1) + 2, Math.max(h, 1) + 2);
    }
    this.canvas.dataset.painted = painted;
    this.canvas.dataset.merged = merged;
  }

  /** The horizontal range of the label of the peak step, if it is visible. */
  peakLabel(context) {
    const backend = plan.backends[this.backend];
    const x = this.x(backend.peak_step + 0.5);
    if (backend.chunks.length !== 1 || x < this.left || x > this.left + this.plotWidth) return null;
    const room = context.measureText(`peak: step ${backend.peak_step}`).width + 8;
    const from = Math.min(Math.max(x - room / 2, this.left), this.left + this.plotWidth - room);
    return [from, from + room, x];
  }

  sizeText() {
    const backend = plan.backends[this.backend];
    const one = backend.chunks.length === 1;
    const optimal = one && backend.lower_bound === this.size;
    const fragmentation = one && !optimal ? `, ${backend.fragmentation.toFixed(1)} % fragmentation` : '';
    return `buffer ${bytesText(this.size)}${optimal && this.plotWidth > 420 ? ' = lower bound' : fragmentation}`;
  }

  /** The buffer's size, its lower bound, the peak step, and addresses. */
  drawLines(context) {
    const backend = plan.backends[this.backend];
    const { left, plotWidth } = this;
    context.fillStyle = palette.quiet;
    context.strokeStyle = palette.line;
    context.lineWidth = 1;
    context.textAlign = 'right';
    for (const address of ticks(this.low, this.high, this.plotHeight / 45, true)) {
      const y = this.y(address);
      if (y < this.top + 8 && address !== 0) continue;
      context.fillText(bytesText(address).replace('.0 ', ' '), left - 5, Math.min(y, this.top + this.plotHeight - 6));
    }
    context.textAlign = 'left';
    const horizontal = (address, colour, dashes, text, align) => {
      const y = this.y(address);
      if (y < this.top - 1 || y > this.top + this.plotHeight + 1) return;
      context.strokeStyle = colour;
      context.lineWidth = 1.5;
      context.setLineDash(dashes);
      context.beginPath();
      context.moveTo(left, y);
      context.lineTo(left + plotWidth, y);
      context.stroke();
      context.setLineDash([]);
      const at = y > this.top + 20 ? y - 9 : this.top - 11;
      if (align === 'left') {
        // A background, because it is drawn over rectangles.
        context.fillStyle = palette.paper;
        context.fillRect(left + 1, at - 7, context.measureText(text).width + 7, 14);
      }
      context.fillStyle = palette.ink;
      context.textAlign = align;
      context.fillText(text, align === 'right' ? left + plotWidth - 4 : left + 4, at);
      context.textAlign = 'left';
    };
    const one = backend.chunks.length === 1;
    const above = one && backend.lower_bound < this.size;
    horizontal(this.size, palette.ink, [], this.sizeText(), 'right');
    if (above) horizontal(backend.lower_bound, palette.copy, [6, 4], `lower bound ${bytesText(backend.lower_bound)}`, 'left');
    const label = this.peakLabel(context);
    if (label) {
      const [from, , x] = label;
      context.strokeStyle = palette.ink;
      context.setLineDash([2, 3]);
      context.beginPath();
      context.moveTo(x, this.top);
      context.lineTo(x, this.top + this.plotHeight);
      context.stroke();
      context.setLineDash([]);
      context.fillStyle = palette.ink;
      context.fillText(`peak: step ${backend.peak_step}`, from + 4, this.height - 9);
    }
  }

  hit(px, py) {
    const step = this.stepAt(px);
    const slackX = ((view.to - view.from) / this.plotWidth) * 1.5;
    const address = this.addressAt(py);
    const slackY = ((this.high - this.low) / this.plotHeight) * 1.5;
    if (px < this.left || py < this.top || py > this.top + this.plotHeight) return null;
    let near = -1;
    for (let at = this.storages.length - 1; at >= 0; at -= 1) {
      const s = this.storages[at];
      const low = S.offset[s];
      const high = low + S.bytes[s];
      if (step >= S.start[s] && step < S.end[s] && address >= low && address < high) return { type: 'storage', index: s };
      if (near < 0 && step >= S.start[s] - slackX && step < S.end[s] + slackX && address >= low - slackY
        && address < high + slackY) near = s;
    }
    return near < 0 ? null : { type: 'storage', index: near };
  }
}

/** All memory of a backend, side by side, to the same scale for all backends. */
class Strip extends Chart {
  constructor(parent, backend) {
    super(parent, 46, `All memory of ${plan.backends[backend].backend}, to scale`, 'strip');
    this.backend = backend;
    const own = [];
    for (let s = 0; s < storageCount; s += 1) if (S.backend[s] === backend && S.chunk[s] < 0) own.push(s);
    own.sort((a, b) => S.usage[a] - S.usage[b] || S.mapped[a] - S.mapped[b] || a - b);
    let at = 0;
    this.places = new Map();
    for (const s of own) {
      this.places.set(s, at);
      at += S.bytes[s];
    }
    this.kept = at;
    this.items = own.map((index) => ({ type: 'storage', index }));
    this.items.push({ type: 'buffer', index: backend });
    this.canvas.dataset.rectangles = own.length;
  }

  static scale() {
    Strip.largest ||= Math.max(1, ...plan.backends.map((b) => b.total + b.mapped));
    return Strip.largest;
  }

  place(bytes) {
    return this.left + (bytes / Strip.scale()) * this.plotWidth;
  }

  rectangle(item) {
    const from = item.type === 'buffer' ? this.kept : this.places.get(item.index);
    const bytes = item.type === 'buffer' ? plan.backends[this.backend].compute : S.bytes[item.index];
    const x = this.place(from);
    return [x, 2, Math.max(this.place(from + bytes) - x, 1), 22];
  }

  draw() {
    const context = this.begin();
    context.fillStyle = palette.field;
    context.fillRect(this.left, 2, this.plotWidth, 22);
    let gap = -10;
    let last = -1;
    for (const item of this.items) {
      const [x, y, w, h] = this.rectangle(item);
      const usage = item.type === 'buffer' ? 3 : S.usage[item.index];
      const lit = item.type === 'buffer' ? !view.matches : !view.matches || view.matches[item.index];
      // Of neighbours within a pixel that look the same only one is drawn.
      const appearance = Math.round(x * 2) * 16 + usage * 2 + (lit ? 1 : 0);
      if (w <= 1 && appearance === last) continue;
      last = appearance;
      context.fillStyle = lit ? palette.usages[usage][item.type !== 'buffer' && S.mapped[item.index] ? 2 : 0] : palette.faint[usage];
      // Slightly wider, so that neighbours narrower than a pixel leave no gaps.
      context.fillRect(x, y, w + 0.3, h);
      if (w > 3 && x - gap > 3) {
        context.fillStyle = palette.paper;
        context.fillRect(x, y, 0.7, h);
        gap = x;
      }
    }
    for (const item of [view.hovered, view.selected]) {
      if (!item || !this.items.some((own) => sameItem(own, item))) continue;
      const [x, y, w, h] = this.rectangle(item);
      context.strokeStyle = palette.focus;
      context.lineWidth = 2;
      context.strokeRect(x - 1, y - 1, w + 2, h + 2);
    }
    context.fillStyle = palette.quiet;
    const b = plan.backends[this.backend];
    const parts = [];
    if (b.weights) parts.push(`weights ${bytesText(b.weights)}`);
    if (b.mapped) parts.push(`mmap ${bytesText(b.mapped)}`);
    if (b.state) parts.push(`KV cache ${bytesText(b.state)}`);
    parts.push(`compute buffer ${bytesText(b.compute)}`);
    context.fillText(fitted(context, parts.join(' · '), this.plotWidth), this.left, 36);
  }

  hit(px, py) {
    if (py < 0 || py > 26) return null;
    return this.items.findLast((item) => {
      const [x, , w] = this.rectangle(item);
      return px >= x && px <= x + Math.max(w, 2);
    }) || null;
  }
}
