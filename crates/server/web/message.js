// One message of the conversation on the page.

import { count, plural, rate, wait } from './format.js';
import { copyButton, el, icon, iconButton } from './dom.js';
import { Markdown } from './markdown.js';
import { tokensPerSecond } from './generate.js';

/** Headings of failures by HTTP status; 0 is a request without an answer. */
function failureHeading({ status, content }) {
  if (content) return 'The answer was interrupted';
  if (!status) return 'No connection';
  if (status === 401 || status === 403) return 'The server wants an API key';
  if (status === 429) return 'The server is busy';
  if (status === 503) return 'The server is not ready';
  return status < 500 ? 'The server refused the request' : 'The server failed';
}

/** A text that arrives in pieces, as markdown. */
class StreamedText {
  constructor(element, prefix = '') {
    this.element = element;
    this.markdown = new Markdown(element);
    if (prefix) this.markdown.append(prefix);
    this.length = 0;
  }

  take(text, complete) {
    this.markdown.append(text.slice(this.length));
    this.length = text.length;
    if (complete) this.markdown.finish();
    else this.markdown.draw();
  }
}

export class MessageView {
  /** `actions`: regenerate, edit, sibling, openSettings; each is called with the message. */
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.cost = 0;
    this.body = el('div', { class: message.role === 'user' ? 'bubble' : 'markdown' });
    this.failure = el('div', { class: 'failure', role: 'alert', hidden: true });
    this.stats = el('p', { class: 'stats' });
    this.versions = el('span', { class: 'versions', role: 'group', 'aria-label': 'Versions of this message', hidden: true });
    this.footer = el('footer', {}, this.versions, this.buttons(), this.stats);
    const who = message.role === 'user' ? 'You' : 'Answer';
    this.element = el('article', { class: `message ${message.role}`, 'aria-label': who, 'data-id': message.id });
    if (message.role === 'user') {
      this.body.textContent = message.content;
      this.element.append(this.body, this.footer);
    } else {
      this.text = new StreamedText(this.body, message.json ? '```json\n' : '');
      this.thinking = this.createThinking();
      this.element.append(this.thinking, this.body, this.failure, this.footer);
      this.draw();
    }
  }

  get streaming() {
    return this.message.state === 'streaming';
  }

  buttons() {
    const { message, actions } = this;
    const answer = message.role === 'assistant';
    return el(
      'span',
      { class: 'actions' },
      copyButton(answer ? 'Copy answer' : 'Copy message', () => message.content),
      answer && iconButton('refresh', 'Regenerate', () => actions.regenerate(message), { class: 'icon-button regenerate' }),
      iconButton('pencil', answer ? 'Edit answer' : 'Edit message', () => this.edit(), { class: 'icon-button edit' }),
    );
  }

  createThinking() {
    this.thinkingLabel = el('span');
    this.thinkingBody = el('div', { class: 'markdown' });
    const details = el(
      'details',
      { class: 'thinking', hidden: true },
      el('summary', {}, icon('brain'), this.thinkingLabel),
      this.thinkingBody,
    );
    details.addEventListener('toggle', () => this.drawThinking());
    return details;
  }

  /** Which of how many versions this is. */
  setVersions(position, total) {
    this.versions.hidden = total < 2;
    if (total < 2) return;
    const { message, actions } = this;
    const step = (name, label, by, at) =>
      iconButton(name, label, () => actions.sibling(message, by), {
        disabled: at,
        class: `icon-button ${by < 0 ? 'previous' : 'next'}`,
      });
    this.versions.replaceChildren(
      step('chevronLeft', 'Previous version', -1, position === 0),
      el('span', {}, `${position + 1}/${total}`),
      step('chevronRight', 'Next version', 1, position + 1 === total),
    );
  }

  /** Draws with one of the next frames. Where drawing takes long, frames are further apart. */
  update() {
    if (this.pending) return;
    this.pending = true;
    const next = () =>
      requestAnimationFrame(() => {
        if (this.pending) this.draw();
      });
    const pause = Math.min(4 * this.cost, 500);
    if (pause < 16) next();
    else setTimeout(next, pause);
  }

  /** Draws what has arrived since the last time. */
  draw() {
    this.pending = false;
    const { message, streaming } = this;
    const start = performance.now();
    if (!this.complete) this.text.take(message.content, !streaming);
    this.complete = !streaming;
    this.drawThinking();
    this.drawStats();
    this.drawFailure();
    this.element.setAttribute('aria-busy', String(streaming));
    this.element.classList.toggle('streaming', streaming);
    this.element.classList.toggle('unanswered', message.state === 'failed' && message.content === '');
    this.cost = performance.now() - start;
  }

  /** Thoughts are folded; nothing is drawn before they are opened. */
  drawThinking() {
    const { message, streaming } = this;
    if (!message.reasoning) return;
    this.thinking.hidden = false;
    const active = streaming && !message.content;
    const time = message.stats?.thought_ms;
    if (active) this.thinkingLabel.textContent = time >= 1000 ? `Thinking… ${Math.floor(time / 1000)} s` : 'Thinking…';
    else this.thinkingLabel.textContent = time >= 1000 ? `Thought for ${wait(time)}` : 'Thought for a moment';
    this.thinking.classList.toggle('active', active);
    if (!this.thinking.open || this.thoughtsComplete) return;
    this.thoughts ??= new StreamedText(this.thinkingBody);
    this.thoughts.take(message.reasoning, !streaming);
    this.thoughtsComplete = !streaming;
  }

  drawStats() {
    const { state, stats = {}, finish, model } = this.message;
    const items = [];
    const add = (text, title) => items.push(el('span', { title }, text));
    const speed = tokensPerSecond(stats);
    if (this.streaming) {
      items.push(
        el(
          'span',
          { class: 'waiting' },
          stats.pieces ? `${plural(stats.pieces, 'token')} so far` : 'Waiting for the first token…',
        ),
      );
    } else {
      if (state === 'stopped') add('Stopped', 'Stopped before its end');
      if (finish === 'length') add('Reached max tokens', 'The answer was cut at the limit of tokens or of the context');
      if (speed !== null) add(`${rate(speed)} tok/s`, 'Generated tokens per second');
      if (stats.first_ms !== undefined) add(`${wait(stats.first_ms)} to first token`, 'Time from sending to the first token');
      if (stats.tokens !== undefined) add(plural(stats.tokens, 'token'), 'Generated tokens');
      if (stats.prompt_tokens !== undefined) {
        const cached = stats.cached_tokens ? `, ${count(stats.cached_tokens)} cached` : '';
        add(
          `${count(stats.prompt_tokens)} prompt${cached}`,
          'Tokens of the prompt, and how many of them the KV cache already had',
        );
      }
      if (model) add(model, 'Model');
    }
    this.stats.replaceChildren(...items);
  }

  drawFailure() {
    const { message } = this;
    const failed = message.state === 'failed';
    this.failure.hidden = !failed;
    if (!failed || this.failure.childElementCount > 0) return;
    const key = message.status === 401 || message.status === 403;
    const pause = message.retryAfter ? ` It asks to wait ${plural(message.retryAfter, 'second')}.` : '';
    this.failure.append(
      el(
        'p',
        {},
        icon('alert'),
        el('strong', {}, failureHeading(message)),
        message.status ? el('span', { class: 'status-code' }, String(message.status)) : null,
      ),
      el('p', { class: 'reason' }, message.error + pause),
      el(
        'div',
        { class: 'row' },
        el('button', { type: 'button', class: 'button retry', onclick: () => this.actions.regenerate(message) }, 'Retry'),
        key &&
          el('button', { type: 'button', class: 'button', onclick: () => this.actions.openSettings('key') }, 'Enter API key'),
      ),
    );
  }

  /** Replaces the message by a field; saving adds a version. */
  edit() {
    if (this.editor || this.streaming) return;
    const { message } = this;
    const field = el('textarea', { 'aria-label': 'Edit message', rows: '3' });
    field.value = message.content;
    const close = () => {
      this.editor.remove();
      this.editor = null;
      this.element.classList.remove('editing');
      this.element.querySelector('.edit')?.focus();
    };
    const save = () => {
      const text = field.value.trim();
      if (text === message.content) return close();
      // The text stays in the field if it is empty or cannot be sent now; else the new version replaces this one.
      return text !== '' && this.actions.edit(message, text) ? undefined : field.focus();
    };
    this.editor = el(
      'form',
      {
        class: 'editor',
        onsubmit: (event) => {
          event.preventDefault();
          save();
        },
      },
      field,
      el(
        'div',
        { class: 'row' },
        el('button', { type: 'submit', class: 'button primary' }, message.role === 'user' ? 'Send' : 'Save'),
        el('button', { type: 'button', class: 'button', onclick: close }, 'Cancel'),
        el('span', { class: 'hint' }, 'The earlier version is kept.'),
      ),
    );
    field.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') {
        event.stopPropagation();
        close();
      } else if (event.key === 'Enter' && !event.shiftKey && !event.isComposing && message.role === 'user') {
        event.preventDefault();
        save();
      }
    });
    this.element.classList.add('editing');
    this.element.prepend(this.editor);
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }
}
