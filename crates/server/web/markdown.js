// Markdown as DOM nodes while it arrives. Blocks that are complete are drawn once; code and tables grow by lines, and only
// the block at the end is drawn again.

import { BlockParser } from './blocks.js';
import { Highlighter } from './highlight.js';
import { inline } from './inline.js';
import { copyButton, el } from './dom.js';

/** Lines of which nothing is shown before they are complete: the beginning or end of a code block. */
const UNDECIDED = /^\s*(?:`{1,2}|`{3,}[^`]*|~{3,}.*)$/;

export class Markdown {
  /** Draws into `target`. */
  constructor(target) {
    this.parser = new BlockParser();
    this.parser.root.element = target;
    this.tail = '';
    this.fresh = false;
  }

  append(text) {
    const lines = text.split('\n');
    lines[0] = this.tail + lines[0];
    this.tail = lines.pop();
    for (const line of lines) this.parser.line(line.endsWith('\r') ? line.slice(0, -1) : line);
    this.fresh ||= lines.length > 0;
  }

  /** Draws what has arrived. */
  draw() {
    if (this.fresh) draw(this.parser.root, { settled: true, parser: this.parser });
    this.fresh = false;
    if (this.tail === '' || UNDECIDED.test(this.tail)) return;
    const mark = this.parser.mark();
    this.parser.line(this.tail);
    draw(this.parser.root, { settled: false, parser: this.parser });
    this.parser.restore(mark);
  }

  /** Draws the end of the text, after which nothing is appended. */
  finish() {
    if (this.tail !== '') this.parser.line(this.tail);
    this.tail = '';
    this.parser.close(1);
    draw(this.parser.root, { settled: true, parser: this.parser });
  }
}

/** Draws a whole text into an element. */
export function drawMarkdown(target, text) {
  const markdown = new Markdown(target);
  markdown.append(text);
  markdown.finish();
}

const creators = {
  quote: () => el('blockquote'),
  list: (node) => el(node.ordered ? 'ol' : 'ul', { start: node.ordered && node.start !== 1 ? String(node.start) : null }),
  item: (node) =>
    node.checked === null
      ? el('li')
      : el('li', { class: node.checked ? 'task done' : 'task', 'aria-label': node.checked ? 'done' : 'not done' }),
  paragraph: () => el('p'),
  // The page has its own h1 and h2: headings of answers begin below them.
  heading: (node) => el(`h${Math.min(node.level + 2, 6)}`, { class: `level-${node.level}` }),
  rule: () => el('hr'),
  code: createCode,
  table: createTable,
};

const drawers = {
  document: drawChildren,
  quote: drawChildren,
  list(node, frame) {
    node.element.classList.toggle('loose', node.loose);
    drawChildren(node, frame);
  },
  item: drawChildren,
  paragraph: drawText,
  heading: drawText,
  rule() {},
  code: drawCode,
  table: drawTable,
};

function draw(node, frame) {
  drawers[node.kind](node, frame);
}

/** Draws the children from the first that may have changed. All but the last of a settled frame are final. */
function drawChildren(node, frame) {
  const { element, children } = node;
  for (let at = node.final ?? 0; at < children.length; at += 1) {
    const child = children[at];
    child.element ??= creators[child.kind](child);
    const there = element.childNodes[at];
    if (there !== child.element) {
      if (there) there.replaceWith(child.element);
      else element.append(child.element);
    }
    draw(child, frame);
  }
  while (element.childNodes.length > children.length) element.lastChild.remove();
  if (frame.settled) node.final = Math.max(children.length - 1, 0);
}

function drawText(node, { parser }) {
  const open = parser.top === node;
  const text = node.lines.join('\n').trimEnd();
  if (node.drawn === text && node.drawnOpen === open) return;
  node.element.replaceChildren(...inline(text, open));
  node.drawn = text;
  node.drawnOpen = open;
}

function createCode(node) {
  const code = el('code', { tabindex: '0', role: 'region', 'aria-label': `${node.language || 'Plain'} code` });
  const copy = copyButton('Copy code', () => node.lines.join('\n'));
  node.code = code;
  node.highlighter = new Highlighter(node.language);
  node.settled = 0;
  return el(
    'figure',
    { class: 'code' },
    el('figcaption', {}, el('span', {}, node.language || 'text'), copy),
    el('pre', {}, code),
  );
}

function drawCode(node, { settled }) {
  node.tailElement?.remove();
  node.tailElement = null;
  if (settled) {
    const lines = document.createDocumentFragment();
    for (; node.settled < node.lines.length; node.settled += 1) {
      lines.append(...node.highlighter.line(node.lines[node.settled]), '\n');
    }
    node.code.append(lines);
  } else if (node.settled < node.lines.length) {
    const preview = node.highlighter.copy();
    node.tailElement = el('span', {}, ...node.lines.slice(node.settled).flatMap((line) => preview.line(line)));
    node.code.append(node.tailElement);
  }
}

function createTable(node) {
  const cell = (text, at) => el('th', { class: node.aligns[at], scope: 'col' }, ...inline(text));
  node.body = el('tbody');
  node.settled = 0;
  const table = el('table', {}, el('thead', {}, el('tr', {}, ...node.header.map(cell))), node.body);
  return el('div', { class: 'table', tabindex: '0', role: 'region', 'aria-label': 'Table' }, table);
}

function drawTable(node, { settled }) {
  const row = (cells) =>
    el('tr', {}, ...node.aligns.map((align, at) => el('td', { class: align }, ...inline(cells[at] ?? '', !settled))));
  node.tailElement?.remove();
  node.tailElement = null;
  if (settled) {
    for (; node.settled < node.rows.length; node.settled += 1) node.body.append(row(node.rows[node.settled]));
  } else if (node.settled < node.rows.length) {
    node.tailElement = row(node.rows.at(-1));
    node.body.append(node.tailElement);
  }
}
