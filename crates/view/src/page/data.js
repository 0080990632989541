'use strict';
// The plan, and formatting of numbers. Strings are inserted as text nodes only, never as markup.

const source = document.getElementById('plan');
const plan = JSON.parse(source.textContent);
// Frees the JSON of a large plan.
if (plan.nodes.node.length > 20000) source.textContent = '';
const N = plan.nodes;
const S = plan.storages;
const T = plan.texts;
const nodeCount = N.node.length;
const storageCount = S.name.length;

const USAGES = [
  { key: 'weight', name: 'weights' },
  { key: 'state', name: 'KV cache (state)' },
  { key: 'input', name: 'inputs' },
  { key: 'compute', name: 'results' },
  { key: 'copy', name: 'copies from other devices' },
  { key: 'scratch', name: 'scratch' },
];

function scaled(value, step, units) {
  let unit = 0;
  while (value >= step && unit + 1 < units.length) {
    value /= step;
    unit += 1;
  }
  return [value, units[unit]];
}

function bytesText(bytes) {
  if (bytes < 1024) return `${bytes} B`;
  const [value, unit] = scaled(bytes / 1024, 1024, ['KiB', 'MiB', 'GiB', 'TiB', 'PiB']);
  return `${value.toFixed(1)} ${unit}`;
}

/** A count with its noun in the singular or plural. */
function plural(count, one, many) {
  return `${count.toLocaleString('en')} ${count === 1 ? one : many}`;
}

function countText(count) {
  const [value, unit] = scaled(count, 1000, ['', 'k', 'M', 'G', 'T', 'P']);
  return `${value.toFixed(unit === '' || value >= 100 ? 0 : 1)} ${unit}`.trim();
}

function secondsText(seconds) {
  const [value, unit] = seconds >= 1 ? [seconds, 's'] : seconds >= 1e-3 ? [seconds * 1e3, 'ms'] : [seconds * 1e6, 'µs'];
  return `${value.toFixed(value >= 100 ? 0 : 1)} ${unit}`;
}

/** A new element with text content. */
function element(tag, text, parent, className) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text;
  if (className) made.className = className;
  if (parent) parent.append(made);
  return made;
}

/** The nodes whose results are in each storage: those of storage s are order[first[s]] … order[first[s + 1] - 1]. */
const storageNodes = (() => {
  const first = new Uint32Array(storageCount + 1);
  for (const s of N.storage) if (s >= 0) first[s + 1] += 1;
  for (let s = 0; s < storageCount; s += 1) first[s + 1] += first[s];
  const next = first.slice();
  const order = new Uint32Array(nodeCount);
  for (let n = 0; n < nodeCount; n += 1) {
    const s = N.storage[n];
    if (s >= 0) order[next[s]++] = n;
  }
  return { first, order };
})();

function nodesIn(storage) {
  return Array.from(storageNodes.order.subarray(storageNodes.first[storage], storageNodes.first[storage + 1]));
}

/** The row of a node in the columns, −1 for views. */
const rowOfNode = (() => {
  const rows = new Int32Array(plan.steps + 1).fill(-1);
  for (let n = 0; n < nodeCount; n += 1) rows[N.node[n]] = n;
  return (node) => (node >= 0 && node < rows.length ? rows[node] : -1);
})();

/** The name of a step: of its node, or of the next node that is not a view. */
function stepName(step) {
  for (let node = step; node < plan.steps; node += 1) {
    const row = rowOfNode(node);
    if (row >= 0) return T[N.name[row]];
  }
  return 'end of the run';
}

/** Copies grouped by source and reader: each group is drawn as one arrow. */
const arrows = (() => {
  const groups = new Map();
  plan.copies.forEach((copy, index) => {
    const key = `${copy.source}>${copy.reader}`;
    const group = groups.get(key);
    if (group) {
      group.copies.push(index);
      group.bytes += copy.bytes;
    } else {
      groups.set(key, { copies: [index], bytes: copy.bytes, source: copy.source, reader: copy.reader, from: copy.from });
    }
  });
  return Array.from(groups.values());
})();
