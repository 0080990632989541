// Building DOM nodes. Strings only ever become text nodes or attributes: nothing on this page is parsed as HTML.

import { paths } from './icons.js';

const SVG = 'http://www.w3.org/2000/svg';

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** An HTML element with attributes, listeners (`onclick: …`) and children. */
export function el(tag, properties, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** An SVG element, as `el`. */
export function svg(tag, properties, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

export function icon(name) {
  return svg('svg', { viewBox: '0 0 24 24', class: 'icon', 'aria-hidden': 'true' }, svg('path', { d: paths[name] }));
}

/** A button that shows an icon alone; its label is for the tooltip and for screen readers. */
export function iconButton(name, label, onclick, properties = {}) {
  return el(
    'button',
    { type: 'button', class: 'icon-button', title: label, 'aria-label': label, onclick, ...properties },
    icon(name),
  );
}

/** The element with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Says a sentence to screen readers. */
export function announce(sentence) {
  const region = byId('announcements');
  region.textContent = '';
  requestAnimationFrame(() => {
    region.textContent = sentence;
  });
}

/** Copies text, also where the clipboard API is missing (plain HTTP on another address than loopback). */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = el('textarea', { class: 'visually-hidden', 'aria-hidden': 'true' });
    field.value = text;
    (document.querySelector('dialog[open]') ?? document.body).append(field);
    field.select();
    const done = document.execCommand('copy');
    field.remove();
    return done;
  }
}

/** A copy button that confirms by a check mark; `text` is called when it is pressed. */
export function copyButton(label, text) {
  const button = iconButton('copy', label, async () => {
    const focused = document.activeElement;
    const done = await copyText(text());
    focused?.focus?.({ preventScroll: true });
    button.replaceChildren(icon(done ? 'check' : 'alert'));
    announce(done ? 'Copied' : 'The browser does not allow copying');
    setTimeout(() => button.replaceChildren(icon('copy')), 1600);
  });
  return button;
}
