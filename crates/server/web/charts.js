// Charts over time as SVG, redrawn from their samples once a second.

import { el, svg } from './dom.js';
import { rate } from './format.js';

/** Seconds that a chart shows, and the gap beyond which its line is broken (the page was hidden). */
export const SPAN = 300;
const GAP = 4;
const HEIGHT = 150;
const MARGIN = { top: 10, right: 6, bottom: 20, left: 40 };

/** The smallest of 1, 2, 5, 10, 20, … that is not below the value. */
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

export class TimeChart {
  /** `series`: { name, label, value(sample) }; with `stacked`, values are drawn on top of each other. */
  constructor({ title, series, stacked = false }) {
    Object.assign(this, { title, series, stacked });
    this.picture = svg('svg', { class: 'chart', role: 'img', height: HEIGHT });
    const legend =
      series.length > 1 &&
      el('p', { class: 'legend' }, ...series.map(({ name, label }) => el('span', {}, el('i', { class: `key ${name}` }), label)));
    this.element = el('figure', { class: 'card' }, el('figcaption', {}, el('h3', {}, title), legend), this.picture);
    this.samples = [];
    new ResizeObserver(() => this.draw(this.samples)).observe(this.picture);
  }

  draw(samples) {
    this.samples = samples;
    const { width } = this.picture.getBoundingClientRect();
    if (width === 0) return;
    const totals = samples.map((sample) => this.levels(sample));
    const top = ceiling(Math.max(...totals.flat(), this.stacked ? 4 : 1));
    const now = samples.at(-1)?.time ?? 0;
    const scale = {
      x: (time) => MARGIN.left + (width - MARGIN.left - MARGIN.right) * (1 - (now - time) / SPAN),
      y: (value) => MARGIN.top + (HEIGHT - MARGIN.top - MARGIN.bottom) * (1 - value / top),
    };
    const runs = continuous(samples, totals);
    const shapes = this.series.flatMap(({ name }, at) => runs.flatMap((run) => this.shape(run, at, name, scale)));
    this.picture.setAttribute('viewBox', `0 0 ${width} ${HEIGHT}`);
    this.picture.setAttribute('aria-label', this.description(samples));
    this.picture.replaceChildren(...grid(width, top, scale), ...shapes.reverse());
  }

  /** The values of a sample; stacked ones are sums. */
  levels(sample) {
    let below = 0;
    return this.series.map(({ value }) => {
      below = this.stacked ? below + value(sample) : value(sample);
      return below;
    });
  }

  /** A line, and the area below it down to the series before. */
  shape(run, at, name, { x, y }) {
    const line = (level) => run.map(({ time, levels }) => `${x(time).toFixed(1)},${y(level(levels)).toFixed(1)}`);
    const upper = line((levels) => levels[at]);
    const lower = line((levels) => (this.stacked ? (levels[at - 1] ?? 0) : 0)).reverse();
    return [
      svg('polyline', { class: `line ${name}`, points: upper.join(' ') }),
      svg('polygon', { class: `area ${name}`, points: [...upper, ...lower].join(' ') }),
    ];
  }

  description(samples) {
    const last = samples.at(-1);
    if (!last) return `${this.title}: no data yet`;
    return `${this.title}: ${this.series.map(({ label, value }) => `${label} ${rate(value(last))}`).join(', ')} now`;
  }
}

/** Samples without gaps between them. */
function continuous(samples, totals) {
  const runs = [];
  samples.forEach(({ time }, at) => {
    if (at === 0 || time - samples[at - 1].time > GAP) runs.push([]);
    runs.at(-1).push({ time, levels: totals[at] });
  });
  return runs;
}

function grid(width, top, { x, y }) {
  const lines = [0, 0.5, 1].map((part) => {
    const height = y(top * part);
    return svg(
      'g',
      {},
      svg('line', { class: 'grid', x1: MARGIN.left, x2: width - MARGIN.right, y1: height, y2: height }),
      svg(
        'text',
        { x: MARGIN.left - 6, y: height + 4, 'text-anchor': 'end' },
        top * part >= 1000 ? `${(top * part) / 1000}k` : String(top * part),
      ),
    );
  });
  const minutes = (width < 420 ? [5, 3, 1] : [5, 4, 3, 2, 1]).map((ago) =>
    svg(
      'text',
      {
        x: x(-60 * ago) - x(0) + width - MARGIN.right,
        y: HEIGHT - 4,
        'text-anchor': ago === 5 ? 'start' : 'middle',
      },
      `−${ago} min`,
    ),
  );
  return [...lines, ...minutes, svg('text', { x: width - MARGIN.right, y: HEIGHT - 4, 'text-anchor': 'end' }, 'now')];
}

/** A bar of parts: { name, label, value }. */
export class PartsBar {
  constructor(label) {
    this.label = label;
    this.bar = el('div', { class: 'parts', role: 'img' });
    this.legend = el('p', { class: 'legend' });
  }

  draw(parts) {
    const total = parts.reduce((sum, { value }) => sum + value, 0);
    this.bar.replaceChildren(
      ...parts
        .filter(({ value }) => value > 0)
        .map(({ name, value }) => {
          const part = el('span', { class: name });
          part.style.flexGrow = String(value / total);
          return part;
        }),
    );
    const text = ({ label, value }) => `${value.toLocaleString('en')} ${label}`;
    this.bar.setAttribute('aria-label', `${this.label}: ${parts.map(text).join(', ')}`);
    this.legend.replaceChildren(...parts.map((part) => el('span', {}, el('i', { class: `key ${part.name}` }), text(part))));
  }
}
