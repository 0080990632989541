// Keyboard shortcuts, and the dialog that lists them.

import { byId, el } from './dom.js';

const apple = /Mac|iPhone|iPad/.test(navigator.platform);
const CONTROL = apple ? '⌘' : 'Ctrl';
const ALT = apple ? '⌥' : 'Alt';

/** `code` is the physical key: with Alt, some layouts type other characters. */
const shortcuts = [
  { keys: ['Enter'], does: 'Send the message' },
  { keys: ['Shift', 'Enter'], does: 'Line break' },
  { keys: ['↑'], does: 'Edit your last message (in an empty field)' },
  { keys: ['Esc'], does: 'Stop the answer; close a panel' },
  { keys: [ALT, 'N'], code: 'KeyN', alt: true, action: 'new', does: 'New conversation' },
  { keys: [ALT, 'R'], code: 'KeyR', alt: true, action: 'regenerate', does: 'Regenerate the last answer' },
  { keys: [ALT, ','], code: 'Comma', alt: true, action: 'previous', does: 'Previous version of the last answer' },
  { keys: [ALT, '.'], code: 'Period', alt: true, action: 'next', does: 'Next version of the last answer' },
  { keys: [ALT, 'I'], code: 'KeyI', alt: true, action: 'input', does: 'Go to the message field' },
  { keys: [CONTROL, 'K'], code: 'KeyK', control: true, action: 'search', does: 'Search conversations' },
  { keys: [ALT, 'S'], code: 'KeyS', alt: true, action: 'settings', does: 'Settings' },
  { keys: [ALT, 'T'], code: 'KeyT', alt: true, action: 'tab', does: 'Switch between Chat and Server' },
  { keys: [CONTROL, '/'], code: 'Slash', control: true, action: 'help', does: 'This list' },
];
const inList = ['↑ ↓ to move, Enter to open, F2 to rename and Delete to delete in the list of conversations.'];

function keysOf(keys) {
  return keys.flatMap((key, at) => (at > 0 ? [' + ', el('kbd', {}, key)] : [el('kbd', {}, key)]));
}

export function startShortcuts(actions) {
  const dialog = byId('help');
  byId('shortcuts').append(...shortcuts.flatMap(({ keys, does }) => [el('dt', {}, ...keysOf(keys)), el('dd', {}, does)]));
  byId('shortcuts').after(...inList.map((sentence) => el('p', { class: 'hint' }, sentence)));
  const help = () => (dialog.open ? dialog.close() : dialog.showModal());
  byId('open-help').addEventListener('click', help);
  byId('close-help').addEventListener('click', () => dialog.close());
  addEventListener('keydown', (event) => {
    if (event.key === 'Escape' && !dialog.open && !event.defaultPrevented) return actions.escape();
    const control = event.ctrlKey || event.metaKey;
    const found = shortcuts.find(
      ({ code, alt = false, control: needed = false }) =>
        alt === event.altKey &&
        needed === control &&
        (code === event.code ? !event.shiftKey : code === 'Slash' && event.key === '/'),
    );
    if (!found) return undefined;
    event.preventDefault();
    if (found.action === 'help') return help();
    return dialog.open ? undefined : actions[found.action]();
  });
}
