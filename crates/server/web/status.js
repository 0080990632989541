// The tab "Server": what the server is doing now. Asks once a second, and only while it is shown.

import { PartsBar, SPAN, TimeChart } from './charts.js';
import { planPath } from './api.js';
import { byId, el } from './dom.js';
import { bytes, count, duration, percent, plural, rate } from './format.js';

const EVERY = 1000;
const MAX_ROWS = 100;

export class ServerStatus {
  constructor(client) {
    this.client = client;
    this.samples = [];
    this.timer = null;
    this.tiles = new Map();
    this.speed = new TimeChart({
      title: 'Tokens per second',
      series: [{ name: 'speed', label: 'tok/s', value: ({ speed }) => speed }],
    });
    this.load = new TimeChart({
      title: 'Sequences',
      stacked: true,
      series: [
        { name: 'running', label: 'running', value: ({ running }) => running },
        { name: 'waiting', label: 'waiting', value: ({ waiting }) => waiting },
      ],
    });
    this.pages = new PartsBar('Pages of the KV cache');
    this.build();
    document.addEventListener('visibilitychange', () => this.schedule());
  }

  build() {
    byId('status-tiles').append(
      ...[
        ['speed', 'Tokens per second'],
        ['running', 'Running'],
        ['waiting', 'Waiting'],
        ['pages', 'Pages in use'],
        ['reused', 'Tokens from cache'],
        ['guessed', 'Drafts accepted'],
        ['computed', 'Computed tokens'],
        ['preempted', 'Preempted'],
      ].map(([name, label]) => this.tile(name, label)),
    );
    byId('status-charts').append(this.speed.element, this.load.element);
    byId('status-pages').append(this.pages.bar, this.pages.legend);
    byId('retry-plan').addEventListener('click', () => this.loadPlan());
    byId('plan-page').addEventListener('click', (event) => this.openPlan(event));
    byId('status-models').addEventListener('change', () => {
      this.samples = [];
      this.schedule();
    });
  }

  tile(name, label) {
    const value = el('dd', {}, '–');
    const note = el('dd', { class: 'note' });
    this.tiles.set(name, { value, note });
    return el('div', { class: 'tile' }, el('dt', {}, label), value, note);
  }

  set(name, value, note = '') {
    const tile = this.tiles.get(name);
    if (tile.value.textContent !== value) tile.value.textContent = value;
    if (tile.note.textContent !== note) tile.note.textContent = note;
  }

  show(visible) {
    this.visible = visible;
    this.schedule();
    if (visible && !this.planLoaded) this.loadPlan();
  }

  schedule() {
    clearTimeout(this.timer);
    this.timer = null;
    if (this.visible && !document.hidden && !this.asking) this.poll();
  }

  async poll() {
    this.asking = true;
    try {
      this.draw(await this.client.status(AbortSignal.timeout(5000)));
      this.problem(null);
    } catch (error) {
      this.problem(error);
    }
    this.asking = false;
    if (this.visible && !document.hidden) this.timer = setTimeout(() => this.schedule(), EVERY);
  }

  problem(error) {
    const box = byId('status-problem');
    box.hidden = error === null;
    byId('server-panel').classList.toggle('stale', error !== null);
    if (error === null) return;
    const reason =
      error.name === 'TimeoutError' || error.name === 'AbortError'
        ? 'The server did not answer within 5 seconds.'
        : error.message;
    const text = `${reason} Trying again every second.`;
    if (box.textContent !== text) box.textContent = text;
  }

  draw(server) {
    const status = this.modelStatus(server);
    const { running = 0, waiting = 0, pages = {}, requests = [] } = status;
    const speed = status.tok_s ?? 0;
    const time = performance.now() / 1000;
    this.samples.push({ time, speed, running, waiting });
    this.samples = this.samples.filter((sample) => time - sample.time <= SPAN);
    this.drawTiles(status, speed);
    this.speed.draw(this.samples);
    this.load.draw(this.samples);
    const { total = 0, used = 0, cached = 0 } = pages;
    this.pages.draw([
      { name: 'used', label: 'in use', value: used },
      { name: 'cached', label: 'cached', value: cached },
      { name: 'free', label: 'free', value: Math.max(total - used - cached, 0) },
    ]);
    byId('status-host').textContent = status.host_bytes ? `${bytes(status.host_bytes)} of prefixes in host memory` : '';
    byId('status-about').textContent = [
      status.version && `Quadriga ${status.version}`,
      status.uptime_s !== undefined && `up ${duration(status.uptime_s)}`,
      status.steps !== undefined && plural(status.steps, 'step'),
    ]
      .filter(Boolean)
      .join(' · ');
    drawRequests(requests);
    this.updatePlan(status);
  }

  /** Loads the picture again once another model is shown, or the same one was loaded again. */
  updatePlan({ model = null, created }) {
    const shown = `${model} ${created}`;
    if (shown === this.planShown) return;
    this.planShown = shown;
    this.planModel = model;
    byId('plan-page').href = planPath('plan', model);
    this.loadPlan();
  }

  /** A link sends no key: with one, the page is fetched and saved. */
  async openPlan(event) {
    if (!this.client.key()) return;
    event.preventDefault();
    try {
      const link = el('a', { href: URL.createObjectURL(await this.client.planPage(this.planModel)), download: 'plan.html' });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
    } catch (error) {
      this.problem(error);
    }
  }

  /** The numbers of the chosen model where several are loaded, else those of the server. */
  modelStatus(server) {
    const names = (server.models ?? []).map(({ model }) => String(model));
    const picker = byId('status-models');
    const several = names.length > 1;
    if (several && names.join('\n') !== Array.from(picker.options, ({ value }) => value).join('\n')) {
      const chosen = picker.value;
      picker.replaceChildren(...names.map((name) => el('option', { value: name }, name)));
      if (names.includes(chosen)) picker.value = chosen;
    }
    picker.hidden = !several;
    byId('status-model').hidden = several;
    byId('status-model').textContent = server.model ?? 'No model is loaded';
    return several ? { ...server, ...server.models[Math.max(picker.selectedIndex, 0)] } : server;
  }

  drawTiles(status, speed) {
    const { running = 0, waiting = 0, pages = {}, computed_tokens: computed = 0, cached_tokens: cached = 0 } = status;
    const { guessed = 0, guessed_right: right = 0 } = status;
    this.set('speed', rate(speed), `peak ${rate(Math.max(...this.samples.map((sample) => sample.speed)))}`);
    this.set('running', count(running), plural(running, 'sequence').replace(/^\S+ /, ''));
    this.set('waiting', count(waiting), 'in the queue');
    this.set('pages', percent(pages.used ?? 0, pages.total ?? 0), `${count(pages.used ?? 0)} of ${count(pages.total ?? 0)}`);
    this.set('reused', percent(cached, cached + computed), `${count(cached)} tokens`);
    this.set('guessed', percent(right, guessed), guessed > 0 ? `${count(right)} of ${count(guessed)}` : 'no drafts');
    this.set('computed', count(computed), 'since the start');
    this.set('preempted', count(status.preempted ?? 0), 'sequences');
  }

  async loadPlan() {
    const image = byId('plan');
    const fallback = byId('no-plan');
    const model = this.planModel;
    try {
      const blob = await this.client.plan(model);
      if (model !== this.planModel) return;
      URL.revokeObjectURL(image.src);
      image.src = URL.createObjectURL(blob);
      await image.decode();
      image.hidden = false;
      fallback.hidden = true;
      this.planLoaded = true;
    } catch (error) {
      if (model !== this.planModel) return;
      image.hidden = true;
      fallback.hidden = false;
      const reason =
        error.status === 404
          ? 'This server has no picture of the plan.'
          : `The picture of the plan could not be loaded: ${error.message}`;
      byId('no-plan-reason').textContent = reason;
    }
  }
}

function drawRequests(requests) {
  const rows = requests.slice(0, MAX_ROWS).map((request) => {
    const prompt = request.prompt_tokens ?? 0;
    const generated = request.generated_tokens ?? 0;
    const state = String(request.state ?? '');
    return el(
      'tr',
      {},
      el('th', { scope: 'row' }, String(request.id)),
      el('td', {}, el('span', { class: 'badge', 'data-state': state }, state)),
      el('td', {}, count(prompt)),
      el('td', {}, count(generated)),
      el('td', {}, lengthBar(prompt, generated, requests)),
      el('td', {}, duration(request.age_s ?? 0)),
    );
  });
  byId('status-requests').replaceChildren(...rows);
  byId('requests-table').hidden = rows.length === 0;
  const more = requests.length - rows.length;
  byId('no-requests').hidden = rows.length > 0 && more <= 0;
  byId('no-requests').textContent = more > 0 ? `and ${plural(more, 'more request')}` : 'No request at the moment.';
}

/** The length of a sequence relative to the longest, prompt and answer in different colours. */
function lengthBar(prompt, generated, requests) {
  const longest = Math.max(...requests.map((request) => (request.prompt_tokens ?? 0) + (request.generated_tokens ?? 0)), 1);
  const part = (name, value) => {
    const span = el('span', { class: name });
    span.style.width = `${(100 * value) / longest}%`;
    return span;
  };
  return el('div', { class: 'length', 'aria-hidden': 'true' }, part('cached', prompt), part('used', generated));
}
