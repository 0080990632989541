// Side panels: beside the content where there is room, above it (with everything else inert) where there is not.

import { byId } from './dom.js';
import { preferences } from './store.js';

const drawers = [];

export class Drawer {
  /** `room` is a media query that says when the panel fits beside the content. */
  constructor(id, { room, button, open }) {
    this.element = byId(id);
    this.name = `drawer.${id}`;
    this.wide = matchMedia(room);
    this.button = byId(button);
    this.button.addEventListener('click', () => this.toggle());
    this.wide.addEventListener('change', () => this.set(this.wide.matches && this.preferred(open)));
    drawers.push(this);
    this.set(this.wide.matches && this.preferred(open));
  }

  preferred(otherwise) {
    return preferences.get(this.name, String(otherwise)) === 'true';
  }

  get isOpen() {
    return this.element.classList.contains('open');
  }

  /** Whether it covers the content. */
  get covers() {
    return this.isOpen && !this.wide.matches;
  }

  toggle() {
    this.set(!this.isOpen);
    if (this.wide.matches) preferences.set(this.name, String(this.isOpen));
    if (this.isOpen) this.focusFirst();
    else this.button.focus();
  }

  open() {
    if (!this.isOpen) this.set(true);
  }

  /** Closes it if it covers the content; true if it did. */
  uncover() {
    if (!this.covers) return false;
    this.set(false);
    this.button.focus();
    return true;
  }

  set(open) {
    this.element.classList.toggle('open', open);
    this.element.inert = !open;
    this.button.setAttribute('aria-expanded', String(open));
    const covering = drawers.find((drawer) => drawer.covers);
    byId('scrim').hidden = !covering;
    byId('main').inert = Boolean(covering);
    for (const drawer of drawers) if (drawer !== covering && covering && drawer.isOpen) drawer.element.inert = true;
    if (!covering) for (const drawer of drawers) drawer.element.inert = !drawer.isOpen;
  }

  focusFirst() {
    this.element.querySelector('button, input, textarea, select')?.focus();
  }
}

/** Closes the panel that covers the content; true if there was one. */
export function uncover() {
  return drawers.some((drawer) => drawer.uncover());
}
