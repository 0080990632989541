// The conversations of this browser: a store, the conversations that are open, and news from other tabs.

import { storeError } from './store.js';

/** While an answer arrives, its conversation is stored this often at most. */
const SAVE_EVERY = 1000;

export class Library extends EventTarget {
  constructor(store) {
    super();
    this.store = store;
    this.open = new Map();
    this.timers = new Map();
    this.removed = new Set();
    this.unsaved = null;
    this.channel = 'BroadcastChannel' in globalThis ? new BroadcastChannel('quadriga') : null;
    if (this.channel) this.channel.onmessage = ({ data }) => this.changedElsewhere(data);
    addEventListener('pagehide', () => this.flush());
  }

  /** The titles, newest first. */
  async titles() {
    const stored = new Map((await this.store.titles()).map((title) => [title.id, title]));
    for (const conversation of this.open.values())
      if (conversation.messages.length > 0) stored.set(conversation.id, conversation);
    return Array.from(stored.values())
      .filter(({ id }) => !this.removed.has(id))
      .sort((a, b) => b.updated - a.updated);
  }

  /** The conversation with this id. The same object as long as it is open, since an answer may be arriving. */
  async get(id) {
    if (!this.open.has(id)) {
      const conversation = await this.store.get(id);
      if (!conversation) return null;
      if (!this.open.has(id)) this.open.set(id, conversation);
    }
    return this.open.get(id);
  }

  add(conversation) {
    this.open.set(conversation.id, conversation);
  }

  /** Frees a conversation that is neither shown nor being answered. Unchanged, it is not stored: another tab may have a newer one. */
  release(conversation) {
    if (this.timers.has(conversation.id)) this.saveNow(conversation);
    this.open.delete(conversation.id);
  }

  /** Stores a conversation soon: changes within a second are stored together. */
  saveSoon(conversation) {
    if (this.timers.has(conversation.id)) return;
    this.timers.set(
      conversation.id,
      setTimeout(() => this.saveNow(conversation), SAVE_EVERY),
    );
  }

  async saveNow(conversation) {
    clearTimeout(this.timers.get(conversation.id));
    this.timers.delete(conversation.id);
    if (conversation.messages.length === 0 || this.removed.has(conversation.id)) return;
    try {
      await this.store.put(conversation);
      this.unsaved = null;
      this.changed(conversation.id);
    } catch (error) {
      this.failed(error);
    }
  }

  async rename(id, title) {
    const conversation = this.open.get(id) ?? (await this.store.get(id));
    if (!conversation) return;
    conversation.title = title;
    await this.saveNow(conversation);
  }

  /** Says once that storing fails, not at every attempt. */
  failed(error) {
    const sentence = storeError(error);
    if (this.unsaved === sentence) return;
    this.unsaved = sentence;
    this.dispatchEvent(new CustomEvent('failed', { detail: sentence }));
  }

  flush() {
    for (const id of this.timers.keys()) this.saveNow(this.open.get(id));
  }

  /** Hides a conversation; `undo` brings it back. It is deleted for good when `undo` is no longer offered. */
  hide(id) {
    this.removed.add(id);
    this.changed(id, false);
    return {
      undo: () => {
        this.removed.delete(id);
        this.changed(id, false);
      },
      commit: () => this.remove(id),
    };
  }

  async remove(id) {
    if (!this.removed.has(id)) return;
    this.open.delete(id);
    try {
      await this.store.remove(id);
      this.changed(id);
    } catch (error) {
      this.failed(error);
    }
  }

  /** Adds conversations of a file, all or none. */
  async import(conversations) {
    await this.store.put(...conversations);
    this.changed(null);
  }

  /** All stored conversations. */
  async all() {
    this.flush();
    const found = [];
    await this.store.each((conversation) => {
      if (!this.removed.has(conversation.id)) found.push(this.open.get(conversation.id) ?? conversation);
    });
    return found.sort((a, b) => a.created - b.created);
  }

  /** The ids of the conversations with this text in their title or a message. */
  async search(text) {
    const needle = text.toLowerCase();
    const has = (value) => value.toLowerCase().includes(needle);
    const found = new Set();
    await this.store.each((stored) => {
      const conversation = this.open.get(stored.id) ?? stored;
      if (has(conversation.title) || conversation.messages.some(({ content }) => has(content))) found.add(conversation.id);
    });
    return found;
  }

  changed(id, tell = true) {
    this.dispatchEvent(new CustomEvent('change'));
    if (tell) this.channel?.postMessage({ id });
  }

  changedElsewhere({ id }) {
    this.dispatchEvent(new CustomEvent('elsewhere', { detail: id }));
    this.dispatchEvent(new CustomEvent('change'));
  }
}
