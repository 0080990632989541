// The list of conversations: open, search, rename, delete, export and import.

import { age, plural } from './format.js';
import { byId, el, iconButton } from './dom.js';
import { download, exported, imported, withoutDuplicates } from './transfer.js';
import { storeError } from './store.js';

export class Sidebar extends EventTarget {
  constructor({ library, chat, toasts }) {
    super();
    Object.assign(this, { library, chat, toasts });
    this.list = byId('conversations');
    this.search = byId('search');
    this.renaming = null;
    this.drawing = 0;
    this.search.addEventListener('input', () => this.draw());
    this.list.addEventListener('keydown', (event) => this.key(event));
    byId('export').addEventListener('click', () => this.export());
    byId('import').addEventListener('click', () => byId('import-file').click());
    byId('import-file').addEventListener('change', (event) => this.import(event.target));
    library.addEventListener('change', () => this.draw());
    chat.addEventListener('change', () => this.draw());
  }

  async draw() {
    if (this.renaming) return;
    this.drawing += 1;
    const turn = this.drawing;
    const text = this.search.value.trim();
    const [titles, found] = await Promise.all([this.library.titles(), text ? this.library.search(text) : null]);
    // A later call has newer titles.
    if (turn !== this.drawing || this.renaming) return;
    const shown = found ? titles.filter(({ id }) => found.has(id)) : titles;
    const focused = this.list.contains(document.activeElement) ? document.activeElement.closest('li')?.dataset.id : null;
    this.list.replaceChildren(...this.groups(shown));
    if (focused) this.list.querySelector(`li[data-id="${CSS.escape(focused)}"] .open`)?.focus();
    byId('no-conversations').hidden = shown.length > 0;
    byId('no-conversations').textContent = text ? 'Nothing found.' : 'Conversations are kept in this browser.';
  }

  groups(titles) {
    const groups = new Map();
    for (const title of titles) {
      const name = age(title.updated);
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push(title);
    }
    return Array.from(groups, ([name, members]) =>
      el('li', { class: 'group' }, el('h3', {}, name), el('ul', {}, ...members.map((title) => this.item(title)))),
    );
  }

  item(title) {
    const current = title.id === this.chat.conversation.id;
    const name = title.title || 'Untitled';
    const running = this.chat.jobs.has(title.id);
    return el(
      'li',
      { class: current ? 'item current' : 'item', 'data-id': title.id },
      el(
        'button',
        {
          type: 'button',
          class: 'open',
          'aria-current': current ? 'true' : null,
          title: name,
          onclick: () => this.open(title.id),
        },
        running && el('span', { class: 'pulse', role: 'img', 'aria-label': 'Answer arriving' }),
        el('span', {}, name),
      ),
      iconButton('pencil', `Rename ${name}`, () => this.rename(title.id), { class: 'icon-button rename' }),
      iconButton('trash', `Delete ${name}`, () => this.delete(title.id), { class: 'icon-button delete' }),
    );
  }

  open(id) {
    this.dispatchEvent(new CustomEvent('open', { detail: id }));
  }

  /** Arrow keys move between conversations, F2 renames, Delete deletes. */
  key(event) {
    const item = event.target.closest('.item');
    if (!item || event.target.matches('input')) return;
    const buttons = Array.from(this.list.querySelectorAll('.open'));
    const at = buttons.indexOf(item.querySelector('.open'));
    const moves = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: buttons.length - 1 };
    if (event.key in moves) buttons[moves[event.key]]?.focus();
    else if (event.key === 'F2') this.rename(item.dataset.id);
    else if (event.key === 'Delete') this.delete(item.dataset.id);
    else return;
    event.preventDefault();
  }

  rename(id) {
    const item = this.list.querySelector(`li[data-id="${CSS.escape(id)}"]`);
    if (!item) return;
    const field = el('input', { type: 'text', 'aria-label': 'Title', maxlength: '200' });
    field.value = item.querySelector('.open').title;
    this.renaming = id;
    let open = true;
    const close = async (save, byKey) => {
      if (!open) return;
      open = false;
      const title = field.value.trim();
      if (save && title) await this.library.rename(id, title);
      this.renaming = null;
      await this.draw();
      if (byKey) this.list.querySelector(`li[data-id="${CSS.escape(id)}"] .open`)?.focus();
      if (save) this.dispatchEvent(new CustomEvent('renamed'));
    };
    field.addEventListener('keydown', (event) => {
      event.stopPropagation();
      if (event.key === 'Enter' && !event.isComposing) close(true, true);
      if (event.key === 'Escape') close(false, true);
    });
    field.addEventListener('blur', () => close(true, false));
    item.replaceChildren(field);
    field.select();
  }

  /** Deletes at once, with an undo for some seconds. */
  delete(id) {
    const hidden = this.library.hide(id);
    this.dispatchEvent(new CustomEvent('deleted', { detail: id }));
    this.search.focus();
    this.toasts.show('Conversation deleted.', { action: 'Undo', onaction: hidden.undo, onclose: hidden.commit });
  }

  async export() {
    const conversations = await this.library.all();
    if (conversations.length === 0) return this.toasts.show('There is no conversation to export.');
    const day = new Date().toISOString().slice(0, 10);
    download(`quadriga-conversations-${day}.json`, exported(conversations));
    return this.toasts.show(`Exported ${plural(conversations.length, 'conversation')}.`);
  }

  async import(input) {
    const [file] = input.files;
    input.value = '';
    if (!file) return;
    try {
      const all = imported(await file.text());
      const fresh = withoutDuplicates(all, await this.library.titles());
      await this.library.import(fresh);
      const known = all.length - fresh.length;
      this.toasts.show(`Imported ${plural(fresh.length, 'conversation')}${known > 0 ? `; ${known} already here` : ''}.`);
    } catch (error) {
      const message = error instanceof DOMException ? storeError(error) : error.message;
      this.toasts.show(`Nothing was imported. ${message}`, { failure: true });
    }
  }
}
