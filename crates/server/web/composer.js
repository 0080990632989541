// The field for the next message, with its send and stop buttons and the settings that are in force.

import { byId, el, icon } from './dom.js';
import { changed } from './settings.js';
import { session } from './store.js';

const SHOWN = 3;

export class Composer {
  constructor(chat, openSettings) {
    this.chat = chat;
    this.openSettings = openSettings;
    this.input = byId('input');
    this.button = byId('send');
    byId('composer').addEventListener('submit', (event) => {
      event.preventDefault();
      this.press();
    });
    this.input.addEventListener('input', () => this.changed());
    this.input.addEventListener('keydown', (event) => this.key(event));
    chat.addEventListener('change', () => this.draw());
  }

  get draftName() {
    return `draft.${this.chat.conversation.messages.length > 0 ? this.chat.conversation.id : 'new'}`;
  }

  /** Shows the draft of the conversation that was opened. */
  restore() {
    this.input.value = session.get(this.draftName);
    this.changed();
    this.draw();
  }

  /** Puts a text into the field. */
  propose(text) {
    this.input.value = text;
    this.changed();
    this.input.focus();
  }

  press() {
    if (this.chat.job) this.chat.stop();
    else this.send();
  }

  send() {
    const text = this.input.value.trim();
    if (text === '' || this.chat.job) return;
    const draft = this.draftName;
    if (!this.chat.send(text)) return;
    session.set(draft, '');
    this.input.value = '';
    this.changed();
  }

  key(event) {
    if (event.isComposing) return;
    if (event.key === 'Enter' && !event.shiftKey) {
      event.preventDefault();
      this.send();
    } else if (event.key === 'ArrowUp' && this.input.value === '') {
      event.preventDefault();
      this.chat.editLast();
    }
  }

  changed() {
    this.input.style.height = 'auto';
    this.input.style.height = `${Math.min(this.input.scrollHeight + 2, 320)}px`;
    session.set(this.draftName, this.input.value);
    this.drawButton();
  }

  draw() {
    this.drawButton();
    const names = changed(this.chat.conversation.settings);
    const shown = names.slice(0, SHOWN);
    if (names.length > SHOWN) shown.push(`${names.length - SHOWN} more`);
    byId('chips').replaceChildren(
      ...shown.map((name) =>
        el(
          'button',
          {
            type: 'button',
            class: 'chip',
            title: 'Open settings',
            onclick: () => this.openSettings(),
          },
          name,
        ),
      ),
    );
  }

  drawButton() {
    const running = Boolean(this.chat.job);
    const label = running ? 'Stop' : 'Send';
    this.button.disabled = !running && this.input.value.trim() === '';
    if (this.button.getAttribute('aria-label') === label) return;
    this.button.setAttribute('aria-label', label);
    this.button.title = running ? 'Stop (Esc)' : 'Send (Enter)';
    this.button.classList.toggle('running', running);
    this.button.replaceChildren(icon(running ? 'stop' : 'arrowUp'));
  }
}
