// Highlighting of code line by line, with what is open at the end of a line (a comment, a string) as the only state.

import { languages } from './languages.js';
import { el } from './dom.js';

const WORD = /[\p{L}_$][\p{L}\p{N}_$]*/uy;
const NUMBER = /0[xX][\da-fA-F_]+|0[bB][01_]+|\d[\d_]*(?:\.\d[\d_]*)?(?:[eE][+-]?\d+)?(?:[a-z]\w{0,4})?/y;
const OTHER = /\s+|[^\s\p{L}\p{N}_$"'`#@/\-*<>[(;!&.:]+|./uy;
/** Lines longer than this are shown without colours. */
const MAX_LINE = 4000;

export class Highlighter {
  constructor(name) {
    this.language = languages[name.toLowerCase()] ?? null;
    this.open = null;
  }

  copy() {
    return Object.assign(Object.create(Highlighter.prototype), this);
  }

  /** The nodes of the next line. */
  line(text) {
    if (!this.language || text.length > MAX_LINE) return [text];
    if (this.language.diff) return diffLine(text);
    const nodes = [];
    let plain = '';
    const flush = () => {
      if (plain) nodes.push(plain);
      plain = '';
    };
    const scan = this.language.markup ? this.markupToken : this.token;
    for (let at = 0; at < text.length;) {
      const [kind, token] = scan.call(this, text, at);
      if (kind) {
        flush();
        nodes.push(el('span', { class: `code-${kind}` }, token));
      } else plain += token;
      at += token.length;
    }
    flush();
    return nodes;
  }

  /** The part of the line up to the end of what is open. */
  rest(text, at) {
    const { kind, close, escapes } = this.open;
    for (let end = at; end < text.length; end += 1) {
      if (escapes && text[end] === '\\') end += 1;
      else if (text.startsWith(close, end)) {
        this.open = null;
        return [kind, text.slice(at, end + close.length)];
      }
    }
    return [kind, text.slice(at)];
  }

  begin(kind, [begin, close], text, at) {
    this.open = { kind, close, escapes: kind === 'string' };
    const [, inside] = this.rest(text, at + begin.length);
    return [kind, begin + inside];
  }

  token(text, at) {
    if (this.open) return this.rest(text, at);
    const { language } = this;
    const starts = (sign) => text.startsWith(sign, at);
    const block = language.block?.find(([begin]) => starts(begin));
    if (block) return this.begin('comment', block, text, at);
    if (language.line?.some(starts) && this.startsComment(text, at)) return ['comment', text.slice(at)];
    const key = match(language.key, text, at);
    if (key) return ['key', key];
    const character = match(language.character, text, at);
    if (character) return ['string', character];
    const long = language.multiline?.find(([begin]) => starts(begin));
    if (long) return this.begin('string', long, text, at);
    if (language.strings?.includes(text[at])) return ['string', quoted(text, at)];
    const meta = match(language.meta, text, at);
    if (meta) return ['meta', meta];
    const word = match(WORD, text, at);
    if (word) return [this.wordKind(word, text, at + word.length), word];
    const number = match(NUMBER, text, at);
    if (number) return ['number', number];
    return [null, match(OTHER, text, at)];
  }

  /** In a shell or YAML, `#` inside a word is no comment. */
  startsComment(text, at) {
    return text[at] !== '#' || at === 0 || /[\s;()]/.test(text[at - 1]);
  }

  wordKind(word, text, end) {
    const { keywords, types, ignoreCase } = this.language;
    const name = ignoreCase ? word.toLowerCase() : word;
    if (keywords.has(name)) return 'keyword';
    if (types.has(name)) return 'type';
    if (text[end] === '(') return 'function';
    return /^[A-Z]\w*[a-z]/.test(word) && types.size > 0 ? 'type' : null;
  }

  markupToken(text, at) {
    if (this.open) return this.rest(text, at);
    if (text.startsWith('<!--', at)) return this.begin('comment', ['<!--', '-->'], text, at);
    const tag = match(/<[/!?]?[\w:.-]*|[/?]?>/y, text, at);
    if (tag) {
      this.inTag = tag.startsWith('<');
      return ['keyword', tag];
    }
    if (!this.inTag) return [match(/&[#\w]+;/y, text, at) ? 'number' : null, match(/&[#\w]+;|[^<&]+|&/y, text, at) ?? text[at]];
    if (text[at] === '"' || text[at] === "'") return ['string', quoted(text, at)];
    const name = match(/[^\s=>"'/]+/y, text, at);
    return name ? ['key', name] : [null, text[at]];
  }
}

function match(pattern, text, at) {
  if (!pattern) return null;
  pattern.lastIndex = at;
  return pattern.exec(text)?.[0] || null;
}

/** A string up to its closing quote or the end of the line. */
function quoted(text, at) {
  let end = at + 1;
  while (end < text.length && text[end] !== text[at]) end += text[end] === '\\' ? 2 : 1;
  return text.slice(at, Math.min(end + 1, text.length));
}

function diffLine(text) {
  const kind = { '+': 'added', '-': 'removed', '@': 'meta' }[text[0]];
  return [kind ? el('span', { class: `code-${kind}` }, text) : text];
}
