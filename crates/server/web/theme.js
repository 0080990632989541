// Light or dark: as the system says, or as the switch says.

import { byId, icon } from './dom.js';
import { preferences } from './store.js';

const NEXT = { system: 'light', light: 'dark', dark: 'system' };
const NAMES = { system: ['system', 'System theme'], light: ['sun', 'Light theme'], dark: ['moon', 'Dark theme'] };

function apply(theme) {
  document.documentElement.dataset.theme = theme;
  const [picture, name] = NAMES[theme];
  const button = byId('theme');
  button.replaceChildren(icon(picture));
  button.title = name;
  button.setAttribute('aria-label', `${name}; switch to ${NAMES[NEXT[theme]][1].toLowerCase()}`);
}

export function startTheme() {
  const stored = preferences.get('theme', 'system');
  apply(stored in NEXT ? stored : 'system');
  byId('theme').addEventListener('click', () => {
    const theme = NEXT[document.documentElement.dataset.theme];
    preferences.set('theme', theme);
    apply(theme);
  });
}
