// The conversation that is shown: sending, stopping, regenerating, editing and switching between versions. Answers go on
// while another conversation is shown.

import { addMessage, newConversation, path, removeMessage, selectSibling } from './tree.js';
import { announce, byId } from './dom.js';
import { excerpt, plural } from './format.js';
import { generate, requestBody } from './generate.js';
import { MessageView } from './message.js';
import { SettingError } from './settings.js';

/** Closer to the end than this, the page follows the answer. */
const NEAR = 60;

export class Chat extends EventTarget {
  /** `model` returns the chosen model, `defaults` the settings of a new conversation, `openSettings` shows one of them. */
  constructor({ client, library, model, defaults, openSettings }) {
    super();
    Object.assign(this, { client, library, model, defaults, openSettings });
    this.jobs = new Map();
    this.views = [];
    this.list = byId('messages');
    this.scroller = byId('scroller');
    this.following = true;
    this.actions = {
      regenerate: (message) => this.regenerate(message),
      edit: (message, text) => this.edit(message, text),
      sibling: (message, step) => this.switchVersion(message, step),
      openSettings,
    };
    this.scroller.addEventListener('scroll', () => this.scrolled(), { passive: true });
    new ResizeObserver(() => this.follow()).observe(this.list);
    new ResizeObserver(() => this.follow()).observe(this.scroller);
    byId('to-end').addEventListener('click', () => this.toEnd());
  }

  /** The answer that is arriving in this conversation. */
  get job() {
    return this.jobs.get(this.conversation.id) ?? null;
  }

  start() {
    this.show(newConversation(this.defaults()));
  }

  show(conversation) {
    const before = this.conversation;
    if (before === conversation) return;
    this.conversation = conversation;
    if (before && !this.jobs.has(before.id)) this.library.release(before);
    this.library.add(conversation);
    // An answer that was arriving when its page was closed.
    for (const message of conversation.messages) {
      if (message.state === 'streaming' && this.job?.message !== message) message.state = 'stopped';
    }
    this.views = [];
    this.list.replaceChildren();
    this.draw();
    this.toEnd();
  }

  /** Draws the path that is selected; views of messages that stay are kept. */
  draw() {
    const steps = path(this.conversation);
    const common = steps.findIndex(({ message }, at) => this.views[at]?.message !== message);
    const keep = common < 0 ? steps.length : common;
    for (const view of this.views.splice(keep)) view.element.remove();
    for (const { message } of steps.slice(keep)) {
      const view = new MessageView(message, this.actions);
      this.views.push(view);
      this.list.append(view.element);
    }
    steps.forEach(({ message, siblings }, at) => this.views[at].setVersions(siblings.indexOf(message), siblings.length));
    byId('welcome').hidden = steps.length > 0;
    this.drawState();
  }

  /** What depends on whether an answer is arriving. */
  drawState() {
    this.list.classList.toggle('busy', this.job !== null);
    this.dispatchEvent(new CustomEvent('change'));
  }

  /** Sends a message at the end of the path; false if a setting must be corrected first. */
  send(text) {
    const last = path(this.conversation).at(-1)?.message;
    return this.add(last?.id, { role: 'user', content: text });
  }

  /** A new version of a message. The one of a user is answered. */
  edit(message, text) {
    if (message.role === 'user') return this.add(message.parent, { role: 'user', content: text });
    const { model } = message;
    const version = addMessage(this.conversation, message.parent, {
      role: 'assistant',
      content: text,
      state: 'done',
      model,
      ...(message.json ? { json: true } : {}),
    });
    this.touched();
    this.draw();
    this.focusMessage(version);
    return true;
  }

  add(parent, fields) {
    if (this.job) {
      announce('Stop the answer first, or wait for its end');
      return false;
    }
    const { conversation } = this;
    const before = { ...conversation.selected };
    const message = addMessage(conversation, parent, fields);
    if (!conversation.title) conversation.title = excerpt(message.content, 60);
    if (this.answer(message)) return true;
    conversation.messages.pop();
    conversation.selected = before;
    this.draw();
    return false;
  }

  regenerate(answer) {
    if (this.job || !answer) return;
    const question = this.conversation.messages.find(({ id }) => id === answer.parent);
    if (!question || !this.answer(question)) return;
    // A failure without any text is no version worth keeping.
    if (answer.state !== 'failed' || answer.content !== '' || answer.reasoning) return;
    removeMessage(this.conversation, answer);
    this.draw();
  }

  /** Asks for an answer below `question`; false if a setting is wrong. */
  answer(question) {
    const { conversation } = this;
    let body;
    try {
      body = requestBody(conversation, question, this.model());
    } catch (error) {
      if (!(error instanceof SettingError)) throw error;
      this.openSettings(error.setting);
      announce(error.message);
      return false;
    }
    const message = addMessage(conversation, question.id, {
      role: 'assistant',
      state: 'streaming',
      model: this.model(),
      ...(body.response_format ? { json: true } : {}),
    });
    this.run(conversation, message, body);
    this.draw();
    this.toEnd();
    return true;
  }

  async run(conversation, message, body) {
    const controller = new AbortController();
    // A page that is left stops its answers; the broken connection would look like a failure of the server.
    const leave = () => controller.abort();
    addEventListener('beforeunload', leave);
    this.jobs.set(conversation.id, { controller, message });
    this.touched(conversation);
    await generate(
      this.client,
      body,
      message,
      () => {
        this.viewOf(message)?.update();
        this.library.saveSoon(conversation);
      },
      controller.signal,
    );
    removeEventListener('beforeunload', leave);
    this.jobs.delete(conversation.id);
    conversation.updated = Date.now();
    const shown = this.conversation === conversation;
    await this.library.saveNow(conversation);
    if (!shown && this.conversation !== conversation) this.library.release(conversation);
    this.viewOf(message)?.draw();
    if (shown) announce(this.ending(message));
    this.drawState();
  }

  ending({ state, error, stats }) {
    if (state === 'failed') return `The answer failed: ${error}`;
    if (state === 'stopped') return 'Stopped';
    return stats?.tokens ? `Answer complete, ${plural(stats.tokens, 'token')}` : 'Answer complete';
  }

  stop() {
    this.job?.controller.abort();
  }

  switchVersion(message, step) {
    const version = selectSibling(this.conversation, message, step);
    if (!version) return;
    this.following = false;
    this.draw();
    this.library.saveNow(this.conversation);
    this.focusMessage(version, step < 0 ? '.previous' : '.next');
  }

  /** The last answer, for shortcuts. */
  lastAnswer() {
    return this.views.findLast(({ message }) => message.role === 'assistant')?.message ?? null;
  }

  editLast() {
    if (!this.job) this.views.findLast(({ message }) => message.role === 'user')?.edit();
  }

  /** Keeps the focus where a keyboard user expects it after messages were replaced. */
  focusMessage(message, selector = '.edit') {
    const element = this.viewOf(message)?.element;
    const button = element?.querySelector(selector);
    (button && !button.disabled ? button : element?.querySelector('.versions button:not([disabled])'))?.focus({
      preventScroll: true,
    });
  }

  viewOf(message) {
    return this.views.find((view) => view.message === message) ?? null;
  }

  touched(conversation = this.conversation) {
    conversation.updated = Date.now();
    this.library.saveNow(conversation);
  }

  scrolled() {
    const distance = this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight;
    this.following = distance < NEAR;
    byId('to-end').hidden = distance < NEAR * 3;
  }

  follow() {
    if (this.following) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  toEnd() {
    this.following = true;
    this.follow();
  }
}
