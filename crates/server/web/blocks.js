// Block structure of markdown, line by line: each complete line is parsed once, however long the text grows.
//
// Containers: document, quote, list, item. Leaves: paragraph, heading, code, table, rule. `stack` holds the open ones from
// the document down. A line that is still being written is parsed like any other and taken back with `mark` and `restore`.

const MAX_DEPTH = 24;
const LEAVES = new Set(['paragraph', 'heading', 'code', 'table', 'rule']);

const blank = (line) => /^\s*$/.test(line);
const indentOf = (line) => line.length - line.trimStart().length;
const isRule = (line) => /^ {0,3}(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})$/.test(line);
const markerOf = (line) => (isRule(line) ? null : /^( *)([-*+]|\d{1,9}[.)])( +(?=\S)|\s*$)/.exec(line));
const fenceOf = (line) => /^( *)(`{3,}|~{3,})\s*([^`]*)$/.exec(line);
const headingOf = (line) => /^ {0,3}(#{1,6})(?:\s+(.*?))??(?:\s+#+)?\s*$/.exec(line);

/** The cells of a table row; `\|` and bars in code are no separators. */
export function cellsOf(line) {
  const cells = [''];
  let code = false;
  const trimmed = line
    .trim()
    .replace(/^\|/, '')
    .replace(/(^|[^\\])\|$/, '$1');
  for (let at = 0; at < trimmed.length; at += 1) {
    const char = trimmed[at];
    if (char === '`') code = !code && trimmed.includes('`', at + 1);
    if (char === '\\' && trimmed[at + 1] === '|') {
      cells[cells.length - 1] += '|';
      at += 1;
    } else if (char === '|' && !code) cells.push('');
    else cells[cells.length - 1] += char;
  }
  return cells.map((cell) => cell.trim());
}

/** The alignments of a delimiter row (`|---|:-:|`), or null. */
function alignmentsOf(line) {
  if (!/^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/.test(line) || !line.includes('|')) return null;
  return cellsOf(line).map((cell) => {
    if (cell.endsWith(':')) return cell.startsWith(':') ? 'center' : 'end';
    return 'start';
  });
}

export class BlockParser {
  constructor() {
    this.root = { kind: 'document', children: [] };
    this.stack = [this.root];
  }

  get top() {
    return this.stack.at(-1);
  }

  /** Closes the open blocks from this depth on. */
  close(depth) {
    this.stack.length = Math.min(this.stack.length, depth);
  }

  open(node) {
    if (LEAVES.has(this.top.kind)) this.stack.pop();
    this.top.children.push(node);
    this.stack.push(node);
    return node;
  }

  /** Everything that parsing one more line can change. */
  mark() {
    return this.stack.map((node) => ({
      node,
      copy: { ...node },
      children: node.children?.length,
      last: node.children?.at(-1),
      lines: node.lines?.length,
      rows: node.rows?.length,
    }));
  }

  restore(mark) {
    for (const { node, copy, children, last, lines, rows } of mark) {
      for (const name of ['loose', 'blank']) node[name] = copy[name];
      if (node.children) {
        node.children.length = children;
        if (children > 0) node.children[children - 1] = last;
      }
      if (node.lines) node.lines.length = lines;
      if (node.rows) node.rows.length = rows;
    }
    this.stack = mark.map(({ node }) => node);
  }

  line(source) {
    const expanded = source.replace(/^[ \t]+/, (space) => space.replaceAll('\t', '    '));
    const [rest, depth] = this.continued(expanded);
    const leaf = this.top;
    if (leaf.kind === 'code' && depth === this.stack.length - 1) return this.codeLine(leaf, rest);
    if (blank(rest)) return this.blankLine(depth);
    const inside = this.openContainers(rest, depth);
    if (inside !== null) return this.leafLine(inside);
    if (this.lazy(rest, depth)) return this.top.lines.push(rest.trimStart());
    this.closeUnmatched(depth);
    return this.leafLine(rest);
  }

  /** Matches the open containers; returns the rest of the line and the number of blocks that continue. */
  continued(line) {
    let rest = line;
    let depth = 1;
    for (; depth < this.stack.length; depth += 1) {
      const node = this.stack[depth];
      if (node.kind === 'quote') {
        const match = /^ {0,3}> ?/.exec(rest);
        if (!match) break;
        rest = rest.slice(match[0].length);
      } else if (node.kind === 'item') {
        // Nested lists below "1." are often indented by two spaces only.
        const indent = indentOf(rest);
        const inside = indent >= node.indent || (indent >= 2 && markerOf(rest) !== null);
        if (!blank(rest) && !inside) break;
        rest = rest.slice(Math.min(indent, node.indent));
      } else if (node.kind !== 'list') break;
    }
    return [rest, depth];
  }

  codeLine(leaf, rest) {
    const fence = fenceOf(rest);
    if (fence && fence[2].startsWith(leaf.fence) && fence[3] === '') this.stack.pop();
    else leaf.lines.push(rest.slice(Math.min(indentOf(rest), leaf.indent)));
  }

  blankLine(depth) {
    this.close(Math.max(depth, 1));
    if (LEAVES.has(this.top.kind)) this.stack.pop();
    for (const node of this.stack) if (node.kind === 'item') node.blank = true;
  }

  /** Opens the quotes and list items that the line starts with; returns the rest of the line, or null if there are none. */
  openContainers(line, matched) {
    let rest = line;
    let depth = matched;
    while (depth < MAX_DEPTH) {
      const quote = /^ {0,3}> ?/.exec(rest);
      const marker = quote ? null : markerOf(rest);
      if (quote) {
        this.closeUnmatched(depth);
        this.open({ kind: 'quote', children: [] });
        rest = rest.slice(quote[0].length);
      } else if (marker && this.mayStartItem(marker, depth)) {
        rest = this.openItem(marker, rest, depth);
      } else break;
      depth = this.stack.length;
    }
    return rest === line ? null : rest;
  }

  /** An empty item, or a number other than 1, does not interrupt a paragraph. */
  mayStartItem([, , symbol, space], depth) {
    if (this.stack[depth - 1].kind === 'list' || this.top.kind !== 'paragraph') return true;
    return space !== '' && (!/\d/.test(symbol) || /^1[.)]$/.test(symbol) || depth < this.stack.length - 1);
  }

  openItem([whole, lead, symbol, space], line, depth) {
    const ordered = symbol.length > 1;
    const type = symbol.at(-1);
    this.close(depth);
    if (this.top.kind === 'list' && this.top.type !== type) this.stack.pop();
    if (this.top.kind !== 'list') {
      this.open({ kind: 'list', ordered, type, start: ordered ? parseInt(symbol, 10) : 1, loose: false, children: [] });
    }
    if (this.top.children.at(-1)?.blank) this.top.loose = true;
    const gap = space.trim() === '' && space.length > 0 && space.length < 5 ? space.length : 1;
    const item = this.open({
      kind: 'item',
      indent: lead.length + symbol.length + gap,
      checked: null,
      blank: false,
      children: [],
    });
    let rest = line.slice(Math.min(whole.length, item.indent));
    const task = /^\[([ xX])\]\s+/.exec(rest);
    if (task) {
      item.checked = task[1] !== ' ';
      rest = rest.slice(task[0].length);
    }
    return rest;
  }

  /** Whether the line goes on with a paragraph although its containers do not. */
  lazy(rest, depth) {
    return this.top.kind === 'paragraph' && depth < this.stack.length - 1 && !isRule(rest) && !fenceOf(rest) && !headingOf(rest);
  }

  /** Closes the blocks that the line did not continue; a list without its item ends. */
  closeUnmatched(depth) {
    const leaf = depth === this.stack.length - 1 && LEAVES.has(this.top.kind);
    if (!leaf) this.close(depth);
    if (this.top.kind === 'list') this.stack.pop();
  }

  leafLine(rest) {
    if (blank(rest)) return;
    const paragraph = this.top.kind === 'paragraph' ? this.top : null;
    const underline = paragraph && /^ {0,3}(={3,}|-{3,})\s*$/.exec(rest);
    if (underline)
      return this.replaceTop({ kind: 'heading', level: underline[1][0] === '=' ? 1 : 2, lines: paragraph.lines.slice() });
    if (isRule(rest)) return this.openClosed({ kind: 'rule' });
    const heading = headingOf(rest);
    if (heading) return this.openClosed({ kind: 'heading', level: heading[1].length, lines: [heading[2] ?? ''] });
    const fence = fenceOf(rest);
    if (fence) {
      this.open({ kind: 'code', indent: fence[1].length, fence: fence[2], language: fence[3].trim().split(/\s+/)[0], lines: [] });
      return;
    }
    if (paragraph && this.startTable(paragraph, rest)) return;
    if (this.top.kind === 'table') this.top.rows.push(cellsOf(rest));
    else if (paragraph) paragraph.lines.push(rest.trimStart());
    else this.open({ kind: 'paragraph', lines: [rest.trimStart()] });
    const item = this.stack.at(-2);
    if (item?.kind === 'item' && item.blank && item.children.length > 1) this.stack.at(-3).loose = true;
  }

  /** A leaf of one line. */
  openClosed(node) {
    this.open(node);
    this.stack.pop();
  }

  replaceTop(node) {
    this.stack.pop();
    this.top.children.pop();
    this.openClosed(node);
  }

  startTable(paragraph, rest) {
    const aligns = alignmentsOf(rest);
    const header = aligns && cellsOf(paragraph.lines.at(-1));
    if (!aligns || header.length !== aligns.length) return false;
    this.stack.pop();
    this.top.children.pop();
    if (paragraph.lines.length > 1) this.top.children.push({ kind: 'paragraph', lines: paragraph.lines.slice(0, -1) });
    this.open({ kind: 'table', aligns, header, rows: [] });
    return true;
  }
}
