// The settings of a conversation, and the fields of a request that they become. An empty setting is not sent: the server's
// default holds.

const number = (name, label, { min, max, step = 'any', whole = false, field = name }) => ({
  name,
  label,
  min,
  max,
  step,
  whole,
  field,
});

/** The settings that are numbers, in the order of the panel. */
export const NUMBERS = [
  number('temperature', 'Temperature', { min: 0, max: 10 }),
  number('top_p', 'Top-p', { min: 0, max: 1 }),
  number('top_k', 'Top-k', { min: 0, max: 1_000_000, step: 1, whole: true }),
  number('min_p', 'Min-p', { min: 0, max: 1 }),
  number('max_tokens', 'Max tokens', { min: 1, max: 10_000_000, step: 1, whole: true }),
  number('seed', 'Seed', { min: 0, max: Number.MAX_SAFE_INTEGER, step: 1, whole: true }),
  number('repeat_penalty', 'Repeat penalty', { min: 0, max: 10 }),
  number('presence_penalty', 'Presence penalty', { min: -2, max: 2 }),
  number('frequency_penalty', 'Frequency penalty', { min: -2, max: 2 }),
];

export const EFFORTS = ['', 'none', 'low', 'medium', 'high'];

export const DEFAULTS = {
  system: '',
  stop: '',
  schema: '',
  effort: '',
  ...Object.fromEntries(NUMBERS.map(({ name }) => [name, ''])),
};

/** A setting that cannot be sent; `name` is the field of the panel. */
export class SettingError extends Error {
  constructor(name, message) {
    super(message);
    this.name = 'SettingError';
    this.setting = name;
  }
}

function numberOf({ name, label, min, max, whole }, text) {
  const value = Number(text);
  if (!Number.isFinite(value)) throw new SettingError(name, `${label} must be a number.`);
  if (whole && !Number.isInteger(value)) throw new SettingError(name, `${label} must be a whole number.`);
  if (value < min || value > max) throw new SettingError(name, `${label} must be between ${min} and ${max}.`);
  return value;
}

/** The JSON schema of the box, or null if the box is empty. */
export function schemaOf(text) {
  if (text.trim() === '') return null;
  let schema;
  try {
    schema = JSON.parse(text);
  } catch (error) {
    throw new SettingError('schema', `The JSON schema is not valid JSON: ${error.message}`);
  }
  if (typeof schema !== 'object' || schema === null || Array.isArray(schema)) {
    throw new SettingError('schema', 'The JSON schema must be an object, such as {"type": "object"}.');
  }
  return schema;
}

/** Stop strings are written one on each line; `\n` stands for a line break. */
export function stopStrings(text) {
  return text
    .split('\n')
    .filter((line) => line !== '')
    .map((line) => line.replaceAll('\\n', '\n').replaceAll('\\t', '\t'));
}

/** The fields of a request. Throws a `SettingError` for the first setting that is wrong. */
export function requestFields(settings) {
  const fields = {};
  for (const definition of NUMBERS) {
    const text = String(settings[definition.name] ?? '').trim();
    if (text !== '') fields[definition.field] = numberOf(definition, text);
  }
  const stop = stopStrings(settings.stop ?? '');
  if (stop.length > 0) fields.stop = stop;
  if (settings.effort) fields.reasoning_effort = settings.effort;
  const schema = schemaOf(settings.schema ?? '');
  if (schema) fields.response_format = { type: 'json_schema', json_schema: { name: 'answer', schema } };
  return fields;
}

/** The names of the settings that differ from the server's defaults, as the reader knows them. */
export function changed(settings) {
  const names = [];
  if (settings.system?.trim()) names.push('System prompt');
  if (settings.schema?.trim()) names.push('JSON schema');
  if (settings.effort) names.push(settings.effort === 'none' ? 'Thinking off' : `Thinking ${settings.effort}`);
  const others = NUMBERS.filter(({ name }) => String(settings[name] ?? '').trim() !== '');
  for (const { name, label } of others) names.push(`${label} ${settings[name]}`);
  if (settings.stop?.trim()) names.push('Stop strings');
  return names;
}
