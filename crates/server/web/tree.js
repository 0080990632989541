// A conversation is a tree of messages: editing or regenerating adds a sibling. The path that is shown follows, from the
// root on, the selected child of each message.
//
// conversation: { id, title, created, updated, settings, messages: [message…], selected: { parent id or "": child id } }
// message: { id, parent, role, content, reasoning, created, model, state, error, stats, json }; a parent precedes its children.

export const ROOT = '';

export function newId() {
  const words = crypto.getRandomValues(new Uint32Array(4));
  return Array.from(words, (word) => word.toString(36).padStart(7, '0')).join('');
}

export function newConversation(settings) {
  const now = Date.now();
  return {
    id: newId(),
    title: '',
    created: now,
    updated: now,
    settings: { ...settings },
    messages: [],
    selected: {},
  };
}

/** Adds a message below `parent` and selects it. */
export function addMessage(conversation, parent, fields) {
  const message = { id: newId(), parent: parent ?? ROOT, content: '', created: Date.now(), ...fields };
  conversation.messages.push(message);
  conversation.selected[message.parent] = message.id;
  return message;
}

/** Removes a message, unless others follow it. */
export function removeMessage(conversation, message) {
  if (conversation.messages.some(({ parent }) => parent === message.id)) return;
  conversation.messages = conversation.messages.filter((other) => other !== message);
}

function childrenByParent(conversation) {
  const children = new Map();
  for (const message of conversation.messages) {
    if (!children.has(message.parent)) children.set(message.parent, []);
    children.get(message.parent).push(message);
  }
  return children;
}

/** The messages that are shown, each with its siblings. */
export function path(conversation) {
  const children = childrenByParent(conversation);
  const steps = [];
  for (let siblings = children.get(ROOT); siblings; siblings = children.get(steps.at(-1).message.id)) {
    const parent = siblings[0].parent;
    const message = siblings.find(({ id }) => id === conversation.selected[parent]) ?? siblings.at(-1);
    steps.push({ message, siblings });
  }
  return steps;
}

/** The messages from the root down to `message`, whether they are shown or not. */
export function ancestors(conversation, message) {
  const byId = new Map(conversation.messages.map((other) => [other.id, other]));
  const line = [];
  for (let at = message; at; at = byId.get(at.parent)) line.unshift(at);
  return line;
}

/** Shows the sibling `step` places after `message`. */
export function selectSibling(conversation, message, step) {
  const siblings = conversation.messages.filter(({ parent }) => parent === message.parent);
  const next = siblings[siblings.indexOf(message) + step];
  if (next) conversation.selected[message.parent] = next.id;
  return next ?? null;
}
