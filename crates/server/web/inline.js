// Inline markdown as DOM nodes: emphasis, code, links, line breaks. One pass over the text and one over its delimiters.

import { el } from './dom.js';

const ENTITIES = { amp: '&', lt: '<', gt: '>', quot: '"', apos: "'", nbsp: '\u00a0' };
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const PLAIN = /[^\\`*_~[\]!<&h\n$]+/y;
const MAX_LINK = 2000;

/** The address if it may be opened: http, https or mailto. */
export function safeUrl(address) {
  try {
    const url = new URL(address);
    return ['http:', 'https:', 'mailto:'].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function link(address, children) {
  const href = safeUrl(address);
  if (!href) return el('span', {}, ...children);
  return el('a', { href, target: '_blank', rel: 'noopener noreferrer nofollow' }, ...children);
}

/** The nodes of a text. `open` says that it is still being written: code and strong text may lack their end. */
export function inline(source, open = false) {
  return new Scanner(source, open).nodes();
}

class Scanner {
  constructor(source, open) {
    Object.assign(this, { source, open, at: 0, tokens: [], brackets: [], missing: new Set() });
  }

  nodes() {
    while (this.at < this.source.length) this.next();
    return emphasis(this.tokens, this.open);
  }

  text(text) {
    const last = this.tokens.length - 1;
    if (typeof this.tokens[last] === 'string') this.tokens[last] += text;
    else this.tokens.push(text);
  }

  /** Takes `length` characters as they are. */
  literal(length) {
    this.text(this.source.slice(this.at, this.at + length));
    this.at += length;
  }

  next() {
    PLAIN.lastIndex = this.at;
    const plain = PLAIN.exec(this.source);
    if (plain) return this.literal(plain[0].length);
    const char = this.source[this.at];
    switch (char) {
      case '\\':
        return this.escape();
      case '`':
        return this.code();
      case '*':
      case '_':
      case '~':
        return this.run(char);
      case '[':
        return this.bracket(1);
      case '!':
        return this.source[this.at + 1] === '[' ? this.bracket(2) : this.literal(1);
      case ']':
        return this.closeBracket();
      case '<':
        return this.autolink();
      case '&':
        return this.entity();
      case 'h':
        return this.bareLink();
      case '$':
        return this.source.startsWith('$$', this.at) ? this.math('$$', '$$') : this.literal(1);
      default:
        this.tokens.push(el('br'));
        this.at += 1;
        return undefined;
    }
  }

  escape() {
    const next = this.source[this.at + 1];
    if (next === '(') return this.math('\\(', '\\)');
    if (next === '[') return this.math('\\[', '\\]');
    if (next === undefined || !(PUNCTUATION.test(next) || next === '\n')) return this.literal(1);
    this.at += 1;
    return next === '\n' ? undefined : this.literal(1);
  }

  /** A formula is shown as it is written, so that its underscores and stars survive. */
  math(begin, end) {
    const stop = this.find(end, this.at + begin.length);
    if (stop < 0) return this.literal(begin.length);
    this.tokens.push(el('span', { class: 'math' }, this.source.slice(this.at, stop + end.length)));
    this.at = stop + end.length;
    return undefined;
  }

  /** Where a text occurs next; remembers that it does not, so that a failed search is not repeated. */
  find(needle, from) {
    if (this.missing.has(needle)) return -1;
    const found = this.source.indexOf(needle, from);
    if (found < 0) this.missing.add(needle);
    return found;
  }

  code() {
    const [ticks] = /^`+/.exec(this.source.slice(this.at, this.at + 80));
    const start = this.at + ticks.length;
    let stop = this.find(ticks, start);
    while (stop >= 0 && (this.source[stop + ticks.length] === '`' || this.source[stop - 1] === '`')) {
      let after = stop;
      while (this.source[after] === '`') after += 1;
      stop = this.find(ticks, after);
    }
    if (stop < 0 && !(this.open && start < this.source.length && !this.source.includes('\n', start)))
      return this.literal(ticks.length);
    let content = this.source.slice(start, stop < 0 ? undefined : stop).replaceAll('\n', ' ');
    if (content.startsWith(' ') && content.endsWith(' ') && content.trim()) content = content.slice(1, -1);
    this.tokens.push(el('code', {}, content));
    this.at = stop < 0 ? this.source.length : stop + ticks.length;
    return undefined;
  }

  run(char) {
    let end = this.at;
    while (this.source[end] === char) end += 1;
    const before = this.source[this.at - 1] ?? ' ';
    const after = this.source[end] ?? ' ';
    const [spaceBefore, spaceAfter] = [/\s/.test(before), /\s/.test(after)];
    const [markBefore, markAfter] = [PUNCTUATION.test(before), PUNCTUATION.test(after)];
    const left = !spaceAfter && (!markAfter || spaceBefore || markBefore);
    const right = !spaceBefore && (!markBefore || spaceAfter || markAfter);
    const word = char === '_' && left && right;
    const size = end - this.at;
    if (char === '~' && size > 2) return this.literal(size);
    this.tokens.push({ char, size, count: size, opens: left && (!word || markBefore), closes: right && (!word || markAfter) });
    this.at = end;
    return undefined;
  }

  bracket(length) {
    this.brackets.push({ index: this.tokens.length, image: length === 2 });
    // A token of its own, so that a link can cut the list here.
    this.tokens.push({ char: '[', text: this.source.slice(this.at, this.at + length) });
    this.at += length;
  }

  closeBracket() {
    const bracket = this.brackets.pop();
    const target =
      bracket &&
      this.source[this.at + 1] === '(' &&
      /^\(\s*(?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\((?:[^\s()\\]|\\.)*\))*))(?:\s+(?:"[^"]*"|'[^']*'|\([^()]*\)))?\s*\)/.exec(
        this.source.slice(this.at + 1, this.at + 1 + MAX_LINK),
      );
    if (!target) return this.literal(1);
    const address = (target[1] ?? target[2]).replace(/\\([!-/:-@[-`{-~])/g, '$1');
    const inside = this.tokens.splice(bracket.index).slice(1);
    // Images are never loaded; their description links to them.
    const children = emphasis(inside, false);
    this.tokens.push(link(address, bracket.image && children.length === 0 ? [address] : children));
    this.at += 1 + target[0].length;
    return undefined;
  }

  autolink() {
    const match = /^<((?:https?:\/\/|mailto:)[^\s<>]+)>/i.exec(this.source.slice(this.at, this.at + MAX_LINK));
    const lineBreak = /^<br\s*\/?>/i.exec(this.source.slice(this.at, this.at + 8));
    if (!match && !lineBreak) return this.literal(1);
    this.tokens.push(match ? link(match[1], [match[1]]) : el('br'));
    this.at += (match ?? lineBreak)[0].length;
    return undefined;
  }

  entity() {
    const match = /^&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|(\w{2,6}));/.exec(this.source.slice(this.at, this.at + 12));
    const code = match && parseInt(match[1] ?? match[2] ?? '', match[2] ? 16 : 10);
    const valid = code > 0 && code <= 0x10ffff && !(code >= 0xd800 && code < 0xe000);
    const character = match && (valid ? String.fromCodePoint(code) : ENTITIES[match[3]]);
    if (!character) return this.literal(1);
    this.text(character);
    this.at += match[0].length;
    return undefined;
  }

  bareLink() {
    const match = /\w/.test(this.source[this.at - 1] ?? ' ')
      ? null
      : /^https?:\/\/[^\s<>"'`\\]+/.exec(this.source.slice(this.at, this.at + MAX_LINK));
    if (!match) return this.literal(1);
    let address = match[0].replace(/[.,:;!?*_~]+$/, '');
    while (/[)\]]$/.test(address) && address.split(/[([]/).length < address.split(/[)\]]/).length) address = address.slice(0, -1);
    this.tokens.push(link(address, [address]));
    this.at += address.length;
    return undefined;
  }
}

const textOf = (token) => {
  if (typeof token === 'string' || token instanceof Node) return token;
  return token.text ?? token.char.repeat(token.count);
};

function element(char, size, children) {
  const tag = char === '~' ? 'del' : ['em', 'strong'][size - 1];
  return el(tag, {}, ...children.map(textOf));
}

/** Whether a run may close another; the sums exclude cases such as `**a*b**`. */
function matches(opener, closer) {
  if (opener.char !== closer.char) return false;
  if (opener.char === '~') return opener.count === closer.count;
  if (!closer.opens && !opener.closes) return true;
  return (opener.size + closer.size) % 3 !== 0 || (opener.size % 3 === 0 && closer.size % 3 === 0);
}

/** Pairs the runs of `*`, `_` and `~`. */
function emphasis(tokens, open) {
  const out = [];
  const openers = [];
  // Openers before these serial numbers do not match closers of a kind: no search is repeated.
  const bottoms = new Map();
  for (const [serial, token] of tokens.entries()) {
    if (token.count === undefined) {
      out.push(token);
      continue;
    }
    while (token.closes && token.count > 0) {
      const kind = `${token.char}${token.opens}${token.char === '~' ? token.count : token.size % 3}`;
      const bottom = bottoms.get(kind) ?? 0;
      let found = openers.length - 1;
      while (found >= 0 && openers[found].serial >= bottom && !matches(openers[found], token)) found -= 1;
      if (found < 0 || openers[found].serial < bottom) {
        bottoms.set(kind, serial);
        break;
      }
      openers.length = found + 1;
      wrap(out, openers, token);
    }
    if (token.count > 0) {
      if (token.opens) {
        Object.assign(token, { serial, index: out.length });
        openers.push(token);
      }
      out.push(token);
    }
  }
  while (open && openers.length > 0) {
    const opener = openers.at(-1);
    if (opener.char === '*' && opener.count >= 2 && opener.index + 1 < out.length) wrap(out, openers, { count: 2 });
    else openers.pop();
  }
  return out.map(textOf);
}

/** Puts what follows the last opener into an element. */
function wrap(out, openers, closer) {
  const opener = openers.at(-1);
  const size = Math.min(opener.count, closer.count, 2);
  const inside = out.splice(opener.index + 1);
  opener.count -= size;
  closer.count -= size;
  if (opener.count === 0) {
    out.pop();
    openers.pop();
  }
  out.push(element(opener.char, size, inside));
}
