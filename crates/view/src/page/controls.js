'use strict';
// Pointer, keyboard and search; the texts and the table around the charts.

const stale = new Set();
/** Redraws these charts, or all, with the next frame. */
function redraw(...some) {
  if (stale.size === 0) {
    requestAnimationFrame(() => {
      const now = Array.from(stale);
      stale.clear();
      now.forEach((chart) => chart.draw());
    });
  }
  (some.length ? some : charts).forEach((chart) => stale.add(chart));
}

function zoom(from, to) {
  const whole = Math.max(plan.steps, 1);
  const span = Math.min(Math.max(to - from, Math.min(4, whole)), whole);
  view.from = Math.min(Math.max(from, 0), whole - span);
  view.to = view.from + span;
  redraw();
}

function zoomBy(factor, about) {
  const middle = about ?? (view.from + view.to) / 2;
  zoom(middle - (middle - view.from) * factor, middle + (view.to - middle) * factor);
}

function zoomAll() {
  charts.forEach((chart) => {
    if (chart instanceof MemoryMap) {
      chart.low = 0;
      chart.high = chart.size;
    }
  });
  zoom(0, plan.steps);
}

const isWhole = () => view.from === 0 && view.to >= plan.steps
  && charts.every((chart) => !(chart instanceof MemoryMap) || chart.high - chart.low === chart.size);

/** The chart of an item, and the item's position on the screen. */
function whereIs(item) {
  const chart = charts.find((one) => one.items.some((own) => sameItem(own, item)));
  if (!chart) return null;
  const [x, y, w, h] = chart.rectangle(item);
  const box = chart.canvas.getBoundingClientRect();
  const right = Math.min(x + w, chart.width - 8);
  return { chart, x: box.left + (Math.max(x, chart.left) + right) / 2, y: box.top + Math.min(y + h / 2, chart.height - 24) };
}

function select(item, pin, reveal) {
  view.selected = item;
  if (!item) {
    redraw();
    return;
  }
  const shown = item.type === 'node' && N.storage[item.index] >= 0 ? { type: 'storage', index: N.storage[item.index] } : item;
  if (shown !== item) view.selected = shown;
  if (reveal && shown.type === 'storage' && S.chunk[shown.index] >= 0) {
    const start = S.start[shown.index];
    const end = S.end[shown.index];
    const visible = start < view.to && end > view.from && (end - start) / (view.to - view.from) > 0.01;
    if (!visible) {
      const room = Math.max((end - start) * 4, 40);
      zoom(start - room, end + room);
    }
  }
  speak(item);
  redraw();
  if (pin) {
    const place = whereIs(shown);
    if (reveal && place) place.chart.canvas.scrollIntoView({ block: 'center' });
    const now = whereIs(shown);
    showDetails(item, now ? now.x : 40, now ? now.y : 80, true);
  }
}

/** The next item in a direction from the selected one. */
function neighbour(chart, key) {
  const items = chart.items;
  const at = items.findIndex((item) => sameItem(item, view.selected));
  if (at < 0) {
    const visible = items.findIndex((item) => {
      const [x, , w] = chart.rectangle(item);
      return x + w > chart.left && x < chart.left + chart.plotWidth;
    });
    return items[Math.max(visible, 0)] || null;
  }
  if (key === 'ArrowRight' || key === 'ArrowLeft') return items[at + (key === 'ArrowRight' ? 1 : -1)] || items[at];
  // Up and down: the nearest item in that direction, preferring the same steps.
  const [x, y, w, h] = chart.rectangle(items[at]);
  const up = key === 'ArrowUp';
  let best = items[at];
  let lowest = Infinity;
  for (const item of items) {
    const [x1, y1, w1, h1] = chart.rectangle(item);
    const distance = up ? y - (y1 + h1) : y1 - (y + h);
    if (distance < -0.5 || sameItem(item, items[at])) continue;
    const apart = Math.max(0, x1 - (x + w), x - (x1 + w1));
    const score = Math.max(distance, 0) + apart * 4;
    if (score < lowest) [lowest, best] = [score, item];
  }
  return best;
}

function onKey(event, chart) {
  const span = view.to - view.from;
  const steps = { '+': 0.5, '=': 0.5, '-': 2 };
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.shiftKey && event.key.startsWith('Arrow')) {
    const way = { ArrowLeft: -0.25, ArrowRight: 0.25 }[event.key] || 0;
    zoom(view.from + way * span, view.to + way * span);
  } else if (event.key.startsWith('Arrow')) {
    const next = neighbour(chart, event.key);
    hideDetails(true);
    if (next) select(next, false, true);
  } else if (event.key === 'Enter' || event.key === ' ') {
    if (view.selected) select(view.selected, true, true);
  } else if (event.key === 'Home' || event.key === 'End') {
    const next = chart.items[event.key === 'Home' ? 0 : chart.items.length - 1];
    if (next) select(next, false, true);
  } else if (steps[event.key]) {
    zoomBy(steps[event.key]);
  } else if (event.key === '0') {
    zoomAll();
  } else {
    return;
  }
  event.preventDefault();
}

function onPointer(chart) {
  const { canvas } = chart;
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  let start = null;
  canvas.addEventListener('pointerdown', (event) => {
    if (event.button === 0) start = at(event);
  });
  canvas.addEventListener('pointermove', (event) => {
    const [x, y] = at(event);
    if (start && !(chart instanceof Strip) && Math.abs(x - start[0]) > 5) {
      if (!canvas.hasPointerCapture(event.pointerId)) canvas.setPointerCapture(event.pointerId);
      view.box = { chart, x0: start[0], y0: start[1], x1: x, y1: y };
      hideDetails(false);
      redraw();
      return;
    }
    const item = chart.hit(x, y);
    if (item && !isPinned()) showDetails(item, event.clientX, event.clientY, false);
    if (!item) hideDetails(false);
    if (!sameItem(item, view.hovered)) {
      view.hovered = item;
      redraw(chart);
    }
  });
  canvas.addEventListener('pointerup', (event) => {
    const [x, y] = at(event);
    const { box } = view;
    view.box = null;
    if (box && box.chart === chart) {
      const [from, to] = [chart.stepAt(Math.min(box.x0, x)), chart.stepAt(Math.max(box.x0, x))];
      if (chart instanceof MemoryMap && Math.abs(y - box.y0) > 24) {
        chart.low = Math.max(0, chart.addressAt(Math.max(box.y0, y)));
        chart.high = Math.min(chart.size, chart.addressAt(Math.min(box.y0, y)));
      }
      zoom(from, to);
    } else if (start) {
      const item = chart.hit(x, y);
      hideDetails(true);
      select(item, false, false);
      if (item) showDetails(item, event.clientX, event.clientY, true);
    }
    start = null;
  });
  canvas.addEventListener('pointercancel', () => {
    start = null;
    view.box = null;
    redraw();
  });
  canvas.addEventListener('pointerleave', () => {
    hideDetails(false);
    view.hovered = null;
    redraw(chart);
  });
  canvas.addEventListener('dblclick', zoomAll);
  canvas.addEventListener('keydown', (event) => onKey(event, chart));
  canvas.addEventListener('wheel', (event) => {
    if (!event.ctrlKey || chart instanceof Strip) return;
    event.preventDefault();
    zoomBy(event.deltaY > 0 ? 1.25 : 0.8, chart.stepAt(at(event)[0]));
  }, { passive: false });
}

/** The searchable text of each node and each storage. */
const haystacks = {
  node: (n) => `${T[N.name[n]]} ${T[N.operation[n]]} ${T[N.dtype[n]]}`.toLowerCase(),
  storage: (s) => `${T[S.name[s]]} ${T[S.dtype[s]]} ${USAGES[S.usage[s]].name}`.toLowerCase(),
};
const MAX_RESULTS = 100;

function search(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const found = document.getElementById('found');
  const results = document.getElementById('results');
  results.replaceChildren();
  results.hidden = words.length === 0;
  if (words.length === 0) {
    view.matches = null;
    found.textContent = '';
    redraw();
    return;
  }
  const matches = (hay) => words.every((word) => hay.includes(word));
  view.matches = new Uint8Array(storageCount);
  const hits = [];
  let nodes = 0;
  for (let n = 0; n < nodeCount; n += 1) {
    if (!matches(haystacks.node(n))) continue;
    nodes += 1;
    if (N.storage[n] >= 0) view.matches[N.storage[n]] = 1;
    if (hits.length < MAX_RESULTS) hits.push({ type: 'node', index: n });
  }
  let storages = 0;
  for (let s = 0; s < storageCount; s += 1) {
    if (!view.matches[s] && matches(haystacks.storage(s))) {
      view.matches[s] = 1;
      if (hits.length < MAX_RESULTS) hits.push({ type: 'storage', index: s });
    }
    storages += view.matches[s];
  }
  found.textContent = `${nodes} of ${nodeCount} operations and ${storages} of ${storageCount} storages match`;
  for (const hit of hits) {
    const button = element('button', undefined, results);
    button.type = 'button';
    const isNode = hit.type === 'node';
    element('b', T[isNode ? N.name[hit.index] : S.name[hit.index]], button);
    const device = plan.backends[isNode ? plan.splits[N.split[hit.index]].backend : S.backend[hit.index]].backend;
    const what = isNode ? T[N.operation[hit.index]] : USAGES[S.usage[hit.index]].name;
    element('span', `${what} on ${device}, ${bytesText(isNode ? N.bytes[hit.index] : S.bytes[hit.index])}`, button);
    button.addEventListener('click', () => select(hit, true, true));
  }
  if (nodes + storages > hits.length && hits.length === MAX_RESULTS) {
    element('span', `first ${MAX_RESULTS} shown`, results);
  }
  redraw();
}

function writeTexts() {
  document.getElementById('title').textContent = `Plan of ${plan.title}`;
  document.getElementById('about').textContent = plan.about;
  const list = document.getElementById('sentences');
  plan.sentences.forEach((sentence) => element('li', sentence, list));
  document.getElementById('estimate-kind').textContent = plan.measured
    ? 'estimates from the measured limits of the devices'
    : 'rough estimates from nominal figures (measure with “quadriga devices --measure”)';
  const legend = document.getElementById('legend');
  const used = new Set(S.usage);
  USAGES.forEach(({ key, name }, usage) => {
    if (!used.has(usage)) return;
    const item = element('li', undefined, legend);
    element('span', undefined, item, 'key').style.background = `var(--${key})`;
    item.append(name);
  });
}

function writeTable() {
  const columns = [['weights', 'weights'], ['mmap', 'mapped'], ['KV cache', 'state'], ['compute', 'compute'], ['staging', 'staging'],
    ['total', 'total'], ['free', 'free']];
  // Empty columns are hidden on narrow screens.
  const className = (key) => (key === 'total' ? 'total' : plan.backends.every((b) => !b[key]) ? 'empty' : '');
  const table = document.getElementById('table');
  const head = element('tr', undefined, element('thead', undefined, table));
  element('th', 'device', head).scope = 'col';
  columns.forEach(([name, key]) => {
    element('th', name, head, className(key)).scope = 'col';
  });
  const body = element('tbody', undefined, table);
  plan.backends.forEach((b) => {
    const row = element('tr', undefined, body);
    element('td', b.backend, row).title = b.description;
    columns.forEach(([, key]) => {
      const text = b[key] ? bytesText(b[key]) : key === 'free' && b[key] === null ? 'unknown' : '–';
      element('td', text, row, className(key));
    });
  });
}

function start() {
  readPalette();
  writeTexts();
  writeTable();
  new Lanes(document.getElementById('lanes'));
  const memory = document.getElementById('memory');
  plan.backends.forEach((backend, index) => {
    const title = element('h3', `${backend.backend} `, memory);
    element('small', `${backend.description}; ${bytesText(backend.total)} in total`, title);
    new Strip(memory, index);
    backend.chunks.forEach((_, chunk) => {
      if (backend.chunks.length > 1) element('p', `buffer ${chunk + 1} of ${backend.chunks.length}`, memory, 'hint');
      new MemoryMap(memory, index, chunk);
    });
  });
  charts.forEach(onPointer);
  const narrow = () => charts.forEach((chart) => {
    if (chart instanceof MemoryMap) chart.height = window.innerWidth < 600 ? 230 : 300;
  });
  narrow();
  window.addEventListener('resize', () => {
    narrow();
    redraw();
  });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
    readPalette();
    redraw();
  });
  let later = 0;
  const box = document.getElementById('search');
  box.addEventListener('input', () => {
    clearTimeout(later);
    later = setTimeout(() => search(box.value), nodeCount > 20000 ? 150 : 0);
  });
  box.addEventListener('keydown', (event) => {
    const first = document.querySelector('#results button');
    if (event.key === 'Enter' && first) first.click();
    if (event.key === 'ArrowDown' && first) {
      first.focus();
      event.preventDefault();
    }
  });
  document.getElementById('results').addEventListener('keydown', (event) => {
    const next = { ArrowDown: 'nextElementSibling', ArrowUp: 'previousElementSibling' }[event.key];
    if (!next) return;
    (document.activeElement[next] || box).focus();
    event.preventDefault();
  });
  document.getElementById('zoom-in').addEventListener('click', () => zoomBy(0.5));
  document.getElementById('zoom-out').addEventListener('click', () => zoomBy(2));
  document.getElementById('zoom-all').addEventListener('click', zoomAll);
  document.addEventListener('keydown', (event) => {
    if (event.key !== 'Escape') return;
    if (hideDetails(true)) return;
    if (view.selected) select(null);
    else if (!isWhole()) zoomAll();
  });
  charts.forEach((chart) => chart.draw());
  document.documentElement.dataset.ready = 'yes';
}

/** For test scripts: counts of items, and their positions on the screen. */
window.quadriga = {
  counts: () => ({
    rectangles: charts.reduce((sum, chart) => sum + Number(chart.canvas.dataset.rectangles || 0), 0),
    blocks: plan.splits.length,
    copies: arrows.reduce((sum, arrow) => sum + arrow.copies.length, 0),
    nodes: nodeCount,
  }),
  place: (type, index) => {
    const found = whereIs({ type, index });
    return found ? { x: found.x, y: found.y, chart: charts.indexOf(found.chart) } : null;
  },
  view: () => ({ from: view.from, to: view.to, selected: view.selected, matches: view.matches ? view.matches.reduce((a, b) => a + b, 0) : null }),
};
start();
