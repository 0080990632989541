// Starts the page: connects the parts with each other, the address and the keyboard.

import { ApiError, Client } from './api.js';
import { Drawer, uncover } from './drawer.js';
import { announce, byId, el, icon } from './dom.js';
import { openStore, preferences, session } from './store.js';
import { Chat } from './chat.js';
import { Composer } from './composer.js';
import { DEFAULTS } from './settings.js';
import { Library } from './library.js';
import { ServerStatus } from './status.js';
import { SettingsPanel } from './settings-panel.js';
import { Sidebar } from './sidebar.js';
import { Toasts } from './toasts.js';
import { startShortcuts } from './shortcuts.js';
import { startTheme } from './theme.js';

for (const element of document.querySelectorAll('[data-icon]')) element.prepend(icon(element.dataset.icon));
startTheme();

const panel = new SettingsPanel();
const client = new Client(() => panel.key);
const toasts = new Toasts();
const library = new Library(await openStore());
const conversationsDrawer = new Drawer('sidebar', { room: '(min-width: 60rem)', button: 'open-sidebar', open: true });
const settingsDrawer = new Drawer('settings', { room: '(min-width: 82rem)', button: 'open-settings', open: false });
const picker = byId('model');
const chat = new Chat({ client, library, model: () => picker.value, defaults, openSettings });
const composer = new Composer(chat, openSettings);
const sidebar = new Sidebar({ library, chat, toasts });
const server = new ServerStatus(client);

/** New conversations begin with the settings that were used last. */
function defaults() {
  try {
    return { ...DEFAULTS, ...JSON.parse(preferences.get('settings', '{}')) };
  } catch {
    return { ...DEFAULTS };
  }
}

function openSettings(name) {
  settingsDrawer.open();
  if (name) panel.focus(name);
  else settingsDrawer.focusFirst();
}

// Models

async function loadModels() {
  try {
    const models = await client.models();
    const wanted = preferences.get('model');
    picker.replaceChildren(...models.map((id) => el('option', { value: id }, id)));
    if (models.length === 0) picker.append(el('option', { value: '' }, 'no model'));
    if (models.includes(wanted)) picker.value = wanted;
    picker.title = picker.value;
    byId('welcome-model').textContent = picker.value;
    byId('connection').hidden = true;
  } catch (error) {
    noModels(error);
  }
}

function noModels(error) {
  if (!(error instanceof ApiError)) throw error;
  const key = error.status === 401 || error.status === 403;
  picker.replaceChildren(el('option', { value: '' }, key ? 'API key needed' : 'not connected'));
  byId('connection').hidden = false;
  byId('connection-reason').textContent = key ? 'This server wants an API key.' : error.message;
  byId('connection-action').textContent = key ? 'Enter API key' : 'Try again';
  byId('connection-action').onclick = () => (key ? openSettings('key') : loadModels());
}

picker.addEventListener('change', () => {
  preferences.set('model', picker.value);
  picker.title = picker.value;
  byId('welcome-model').textContent = picker.value;
});
panel.addEventListener('key', loadModels);

// Conversations and the address

async function openConversation(id) {
  const conversation = id ? await library.get(id) : null;
  if (conversation) show(conversation);
  else newConversation();
}

function show(conversation) {
  chat.show(conversation);
  panel.show(conversation.settings);
  composer.restore();
  if (selectedTab() === 'chat') setAddress('chat');
  drawTitle();
}

/** The address opens the same view again. */
function setAddress(tab) {
  const { id, messages } = chat.conversation;
  const kept = messages.length > 0;
  session.set('conversation', kept ? id : '');
  const address = tab === 'server' ? '#server' : kept && `#c=${id}`;
  if (location.hash !== (address || '')) history.replaceState(null, '', address || location.pathname + location.search);
}

function newConversation() {
  selectTab('chat');
  if (chat.conversation?.messages.length !== 0) {
    chat.start();
    show(chat.conversation);
  }
  byId('input').focus();
}

function drawTitle() {
  const title = chat.conversation?.title;
  document.title = title ? `${title} · Quadriga` : 'Quadriga';
}

function followAddress() {
  if (chat.conversation && !/^(?:#?|#server|#c=.*)$/.test(location.hash)) return undefined;
  const id = /^#c=(\w+)$/.exec(location.hash)?.[1];
  selectTab(location.hash === '#server' ? 'server' : 'chat', false);
  if (location.hash === '#server') return chat.conversation ? undefined : openLast();
  return id && id === chat.conversation?.id ? undefined : openConversation(id);
}

/** The conversation that was open before the tab "Server" was loaded again, or a new one. */
async function openLast() {
  const id = session.get('conversation');
  const conversation = id ? await library.get(id) : null;
  if (!conversation) chat.start();
  show(conversation ?? chat.conversation);
}

sidebar.addEventListener('open', ({ detail }) => {
  selectTab('chat');
  openConversation(detail);
  uncover();
});
sidebar.addEventListener('renamed', drawTitle);
sidebar.addEventListener('deleted', ({ detail }) => {
  chat.jobs.get(detail)?.controller.abort();
  if (chat.conversation.id !== detail) return;
  chat.start();
  show(chat.conversation);
});
panel.addEventListener('change', () => {
  preferences.set('settings', JSON.stringify(panel.settings));
  library.saveSoon(chat.conversation);
  composer.draw();
});
chat.addEventListener('change', () => {
  drawTitle();
  if (selectedTab() === 'chat') setAddress('chat');
});
library.addEventListener('failed', ({ detail }) => toasts.show(detail, { failure: true }));
library.addEventListener('elsewhere', async ({ detail }) => {
  // Another tab changed the conversation that is shown here.
  if (detail !== chat.conversation.id || chat.job) return;
  const stored = await library.store.get(detail);
  if (stored && stored.updated > chat.conversation.updated && !chat.job) show(stored);
});

// Tabs

const tabs = { chat: byId('chat-tab'), server: byId('server-tab') };

function selectedTab() {
  return tabs.server.getAttribute('aria-selected') === 'true' ? 'server' : 'chat';
}

function selectTab(name, address = true) {
  for (const [other, tab] of Object.entries(tabs)) {
    tab.setAttribute('aria-selected', String(other === name));
    tab.tabIndex = other === name ? 0 : -1;
    byId(`${other}-panel`).hidden = other !== name;
  }
  server.show(name === 'server');
  if (address && chat.conversation) setAddress(name);
}

for (const [name, tab] of Object.entries(tabs)) {
  const other = name === 'chat' ? 'server' : 'chat';
  tab.addEventListener('click', () => selectTab(name));
  tab.addEventListener('keydown', (event) => {
    if (event.key !== 'ArrowLeft' && event.key !== 'ArrowRight') return;
    selectTab(other);
    tabs[other].focus();
  });
}

// Buttons and keys

byId('new').addEventListener('click', () => {
  uncover();
  newConversation();
});
document.querySelector('.skip').addEventListener('click', (event) => {
  event.preventDefault();
  selectTab('chat');
  byId('input').focus();
});
byId('scrim').addEventListener('click', uncover);
for (const button of document.querySelectorAll('.close-drawer')) button.addEventListener('click', uncover);
byId('close-settings').addEventListener('click', () => settingsDrawer.isOpen && settingsDrawer.toggle());
for (const button of document.querySelectorAll('.example'))
  button.addEventListener('click', () => composer.propose(button.textContent));

startShortcuts({
  escape() {
    if (!uncover() && chat.job) chat.stop();
  },
  new: newConversation,
  regenerate: () => chat.regenerate(chat.lastAnswer()),
  previous: () => chat.lastAnswer() && chat.switchVersion(chat.lastAnswer(), -1),
  next: () => chat.lastAnswer() && chat.switchVersion(chat.lastAnswer(), 1),
  input() {
    selectTab('chat');
    byId('input').focus();
  },
  search() {
    conversationsDrawer.open();
    byId('search').focus();
  },
  settings: () => settingsDrawer.toggle(),
  tab() {
    selectTab(selectedTab() === 'chat' ? 'server' : 'chat');
    announce(selectedTab() === 'chat' ? 'Chat' : 'Server');
  },
});

addEventListener('hashchange', followAddress);
await Promise.all([followAddress(), loadModels()]);
composer.restore();
sidebar.draw();
if (!library.store.persistent)
  toasts.show('This browser does not store conversations for this page: they end with it.', { failure: true });
document.documentElement.dataset.ready = 'true';
