// Conversations as a file. An import is checked field by field before anything is stored.

import { DEFAULTS } from './settings.js';
import { newId, ROOT } from './tree.js';

const FORMAT = 'quadriga-conversations';
const VERSION = 1;
const ROLES = ['user', 'assistant'];
const STATES = ['done', 'stopped', 'failed'];

export function exported(conversations) {
  return JSON.stringify({ format: FORMAT, version: VERSION, exported: new Date().toISOString(), conversations }, null, 1);
}

class ImportError extends Error {}

function check(holds, where, what) {
  if (!holds) throw new ImportError(`${where} ${what}.`);
}

const isObject = (value) => typeof value === 'object' && value !== null && !Array.isArray(value);
const isTime = (value) => Number.isFinite(value) && value >= 0;

function checkedMessage(message, where, known) {
  check(isObject(message), where, 'is not an object');
  check(
    typeof message.id === 'string' && message.id !== '' && !known.has(message.id),
    `${where}.id`,
    'must be a text of its own',
  );
  check(message.parent === ROOT || known.has(message.parent), `${where}.parent`, 'must be the id of an earlier message, or ""');
  check(ROLES.includes(message.role), `${where}.role`, 'must be "user" or "assistant"');
  check(typeof message.content === 'string', `${where}.content`, 'must be a text');
  const copy = { id: message.id, parent: message.parent, role: message.role, content: message.content };
  copy.created = isTime(message.created) ? message.created : Date.now();
  for (const name of ['reasoning', 'model', 'error', 'finish']) {
    check(
      message[name] === undefined || message[name] === null || typeof message[name] === 'string',
      `${where}.${name}`,
      'must be a text',
    );
    if (message[name]) copy[name] = message[name];
  }
  if (message.role === 'assistant') copy.state = STATES.includes(message.state) ? message.state : 'stopped';
  if (message.json === true) copy.json = true;
  for (const name of ['status', 'retryAfter']) if (Number.isFinite(message[name])) copy[name] = message[name];
  if (isObject(message.stats)) {
    copy.stats = Object.fromEntries(Object.entries(message.stats).filter(([, value]) => Number.isFinite(value)));
  }
  known.add(message.id);
  return copy;
}

function checkedConversation(conversation, where) {
  check(isObject(conversation), where, 'is not an object');
  check(
    Array.isArray(conversation.messages) && conversation.messages.length > 0,
    `${where}.messages`,
    'must be a list with at least one message',
  );
  check(typeof (conversation.title ?? '') === 'string', `${where}.title`, 'must be a text');
  const known = new Set();
  const messages = conversation.messages.map((message, at) => checkedMessage(message, `${where}.messages[${at}]`, known));
  const selected = isObject(conversation.selected) ? Object.entries(conversation.selected) : [];
  const settings = isObject(conversation.settings) ? conversation.settings : {};
  return {
    id: typeof conversation.id === 'string' && conversation.id !== '' ? conversation.id : newId(),
    title: conversation.title ?? '',
    created: isTime(conversation.created) ? conversation.created : Date.now(),
    updated: isTime(conversation.updated) ? conversation.updated : Date.now(),
    settings: Object.fromEntries(Object.keys(DEFAULTS).map((name) => [name, String(settings[name] ?? '')])),
    messages,
    selected: Object.fromEntries(
      selected.filter(([parent, child]) => (parent === ROOT || known.has(parent)) && known.has(child)),
    ),
  };
}

/** The conversations of a file. Throws an error that names the field that is wrong. */
export function imported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch (error) {
    throw new ImportError(`The file is not JSON: ${error.message}`);
  }
  check(isObject(file) && file.format === FORMAT, 'The file', 'is not an export of conversations');
  check(file.version === VERSION, 'The version of the file', `must be ${VERSION}, but is ${JSON.stringify(file.version)}`);
  check(Array.isArray(file.conversations), 'conversations', 'must be a list');
  return file.conversations.map((conversation, at) => checkedConversation(conversation, `conversations[${at}]`));
}

/** Leaves out conversations that are here already, and gives changed ones an id of their own. */
export function withoutDuplicates(conversations, titles) {
  const here = new Map(titles.map((title) => [title.id, title]));
  return conversations
    .filter(({ id, updated }) => here.get(id)?.updated !== updated)
    .map((conversation) => (here.has(conversation.id) ? { ...conversation, id: newId() } : conversation));
}

/** Offers a text as a download. */
export function download(name, text) {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([text], { type: 'application/json' }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
