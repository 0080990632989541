// One Chromium for each file of tests; each test gets a page with its own storage and a mock server of its own. Violations of the
// CSP, errors in the console and requests to other addresses fail the test.

import assert from 'node:assert/strict';
import { after } from 'node:test';
import { createRequire } from 'node:module';
import { Mock } from './mock.mjs';

const { chromium } = createRequire(import.meta.url)('playwright-core');
const TIMEOUT = 10_000;
let launched = null;

function browser() {
  launched ??= chromium.launch({
    executablePath: process.env.QUADRIGA_BROWSER,
    args: ['--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage'],
  });
  return launched;
}

after(async () => (await launched)?.close());

/** Failed requests are logged by the browser itself; pages may show them. */
const EXPECTED = /^Failed to load resource: /;

/** A page at `url`, or at a new mock server. Options are those of a browser context. */
export async function open(t, { url, mock = null, hash = '', ...options } = {}) {
  const server = url ? null : (mock ?? (await new Mock().start()));
  const address = url ?? server.url;
  const context = await (
    await browser()
  ).newContext({ viewport: { width: 1100, height: 760 }, reducedMotion: 'reduce', ...options });
  context.setDefaultTimeout(TIMEOUT);
  const problems = [];
  const watch = (page) => {
    page.on('pageerror', (error) => problems.push(`error: ${error.stack}`));
    page.on('console', (message) => {
      const text = message.text();
      if (/Content Security Policy/i.test(text) || (message.type() === 'error' && !EXPECTED.test(text)))
        problems.push(`console: ${text}`);
    });
    page.on('request', (request) => {
      const to = request.url();
      if (!to.startsWith(address) && !/^(?:data|blob):/.test(to)) problems.push(`request to ${to}`);
    });
    page.on('dialog', (dialog) => {
      problems.push(`dialog: ${dialog.message()}`);
      dialog.dismiss();
    });
  };
  context.on('page', watch);
  await context.addInitScript(() => {
    addEventListener('securitypolicyviolation', (event) =>
      console.error(`Content Security Policy: ${event.violatedDirective} ${event.blockedURI}`),
    );
  });
  const page = await context.newPage();
  t.after(async () => {
    await context.close();
    if (server && !mock) await server.stop();
    assert.deepEqual(problems, []);
  });
  await page.goto(address + hash);
  await ready(page);
  return { page, mock: server, context };
}

export async function ready(page) {
  await page.waitForSelector('html[data-ready]', { state: 'attached' });
}

/** Sends a message and waits for the end of the answer. */
export async function ask(page, text) {
  await page.fill('#input', text);
  await page.press('#input', 'Enter');
  await answered(page);
}

/** Waits until no answer is arriving. */
export async function answered(page) {
  await page.waitForFunction(
    () =>
      document.querySelector('.message.assistant') &&
      !document.querySelector('.message.streaming') &&
      document.querySelector('#send').getAttribute('aria-label') === 'Send',
  );
}

/** The texts of the messages that are shown. */
export function texts(page) {
  return page
    .locator('.message')
    .evaluateAll((messages) => messages.map((message) => message.querySelector('.bubble, :scope > .markdown').innerText.trim()));
}

/** Waits until a condition on this side holds. */
export async function until(condition, what) {
  const end = Date.now() + TIMEOUT;
  while (!condition()) {
    assert.ok(Date.now() < end, `timed out: ${what}`);
    await new Promise((resolve) => {
      setTimeout(resolve, 10);
    });
  }
}
