// The panel of settings: API key, system prompt, sampling, JSON schema.

import { EFFORTS, NUMBERS, SettingError, requestFields, schemaOf } from './settings.js';
import { byId, el } from './dom.js';
import { session } from './store.js';

const EFFORT_NAMES = { '': 'Model’s default', none: 'Off', low: 'Low', medium: 'Medium', high: 'High' };

export class SettingsPanel extends EventTarget {
  constructor() {
    super();
    this.settings = {};
    this.key = session.get('key');
    this.fields = new Map();
    const sampling = NUMBERS.map((definition) =>
      this.field(
        definition.label,
        definition.name,
        el('input', {
          type: 'text',
          inputmode: definition.whole ? 'numeric' : 'decimal',
          placeholder: 'default',
          autocomplete: 'off',
          spellcheck: 'false',
        }),
      ),
    );
    const effort = el('select', {}, ...EFFORTS.map((value) => el('option', { value }, EFFORT_NAMES[value])));
    byId('settings-fields').append(
      this.group(
        'Conversation',
        this.field('System prompt', 'system', el('textarea', { rows: '4', placeholder: 'How should the model behave?' })),
        this.field('Thinking', 'effort', effort),
      ),
      this.group(
        'Sampling',
        el('div', { class: 'pairs' }, ...sampling),
        this.field(
          'Stop strings',
          'stop',
          el('textarea', { rows: '2', placeholder: 'one a line; \\n is a line break', spellcheck: 'false' }),
        ),
      ),
      this.group(
        'Structured output',
        this.field(
          'JSON schema',
          'schema',
          el('textarea', {
            rows: '5',
            class: 'mono',
            spellcheck: 'false',
            placeholder: '{"type": "object",\n "properties": {"name": {"type": "string"}},\n "required": ["name"]}',
          }),
          'The answer is valid under this schema. Leave empty for text.',
        ),
      ),
      el('button', { type: 'button', class: 'button', id: 'reset-settings', onclick: () => this.reset() }, 'Reset to defaults'),
      this.group('Server', this.keyField()),
    );
  }

  group(title, ...children) {
    return el('fieldset', {}, el('legend', {}, title), ...children);
  }

  field(label, name, input, hint) {
    const id = `setting-${name}`;
    input.id = id;
    input.setAttribute('aria-describedby', `${id}-note`);
    const note = el('p', { class: 'note', id: `${id}-note` }, hint ?? '');
    this.fields.set(name, { input, note, hint: hint ?? '' });
    input.addEventListener('input', () => this.changed(name));
    return el('div', { class: 'field' }, el('label', { for: id }, label), input, note);
  }

  keyField() {
    const input = el('input', { type: 'password', autocomplete: 'off', placeholder: 'none', spellcheck: 'false' });
    const field = this.field('API key', 'key', input, 'Forgotten when this tab is closed.');
    input.value = this.key;
    input.addEventListener('change', () => this.dispatchEvent(new CustomEvent('key')));
    return field;
  }

  /** Shows the settings of a conversation; changes are written into them. */
  show(settings) {
    this.settings = settings;
    for (const [name, { input }] of this.fields) if (name !== 'key') input.value = settings[name] ?? '';
    this.check();
  }

  changed(name) {
    const { input } = this.fields.get(name);
    if (name === 'key') {
      this.key = input.value.trim();
      session.set('key', this.key);
      return;
    }
    this.settings[name] = input.value;
    this.check();
    this.dispatchEvent(new CustomEvent('change'));
  }

  reset() {
    for (const [name, { input }] of this.fields) {
      if (name === 'key') continue;
      input.value = '';
      this.settings[name] = '';
    }
    this.check();
    this.dispatchEvent(new CustomEvent('change'));
  }

  /** Marks the settings that cannot be sent. */
  check() {
    for (const [name, { input, note, hint }] of this.fields) {
      const problem = name === 'key' ? null : this.problem(name);
      note.textContent = problem ?? hint;
      note.classList.toggle('wrong', problem !== null);
      if (problem) input.setAttribute('aria-invalid', 'true');
      else input.removeAttribute('aria-invalid');
    }
  }

  problem(name) {
    try {
      if (name === 'schema') schemaOf(this.settings.schema ?? '');
      else requestFields({ [name]: this.settings[name] });
      return null;
    } catch (error) {
      if (error instanceof SettingError) return error.message;
      throw error;
    }
  }

  focus(name) {
    this.fields.get(name)?.input.focus();
  }
}
