// The tab "Server".

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { open, until } from './browser.mjs';

test('numbers, charts, pages, requests and the plan are shown', async (t) => {
  const { page, mock } = await open(t, { hash: '#server' });
  await page.waitForSelector('.tile dd:text-is("42.5")');
  const tiles = await page.innerText('#status-tiles');
  for (const expected of [/Running\s+2/, /Waiting\s+1/, /25\.0 %/, /128 of 512/, /75\.0 %/, /3,000 tokens/, /1,000/])
    assert.match(tiles, expected);
  assert.match(await page.innerText('.status-head'), /mock-model[\s\S]*Quadriga 0\.1\.0 · up 1 h 2 min · 5,120 steps/);
  assert.match(await page.innerText('#status-pages'), /128 in use[\s\S]*256 cached[\s\S]*128 free/);
  assert.match(await page.innerText('#status-host'), /3\.0 MiB/);
  assert.equal(await page.locator('#status-requests tr').count(), 3);
  assert.match(await page.innerText('#status-requests'), /1\s+running\s+800\s+150/);
  await page.waitForSelector('#plan:not([hidden])');
  assert.ok(await page.evaluate(() => document.querySelector('#plan').naturalWidth > 0));
  assert.match(await page.getAttribute('.chart', 'aria-label'), /Tokens per second: tok\/s 42\.5 now/);
  // Changes of the next polls.
  mock.status = { ...mock.status, tok_s: 99, running: 5, requests: [] };
  await page.waitForSelector('.tile dd:text-is("99.0")');
  assert.equal(await page.isVisible('#no-requests'), true);
  const points = await page.getAttribute('.chart .line.speed', 'points');
  assert.ok(points.split(' ').length >= 2, points);
});

test('one of several models is watched', async (t) => {
  const { page, mock } = await open(t);
  const { status } = mock;
  mock.status = {
    ...status,
    models: [
      { ...status, model: 'small', tok_s: 11 },
      { ...status, model: 'large', tok_s: 22, running: 7 },
    ],
  };
  await page.click('#server-tab');
  await page.waitForSelector('.tile dd:text-is("11.0")');
  await page.selectOption('#status-models', 'large');
  await page.waitForSelector('.tile dd:text-is("22.0")');
  assert.match(await page.innerText('#status-tiles'), /Running\s+7/);
  await until(() => mock.plans.at(-1) === 'large', 'the plan of the other model');
  assert.match(await page.getAttribute('#plan-page', 'href'), /plan\?model=large$/);
  // The same model, loaded again.
  const { length } = mock.plans;
  mock.status = { ...mock.status, models: mock.status.models.map((model) => ({ ...model, created: 2 })) };
  await until(() => mock.plans.length > length, 'the new plan');
});

test('polls only while the tab is shown', async (t) => {
  const { page, mock } = await open(t);
  assert.equal(mock.polls, 0);
  await page.click('#server-tab');
  await until(() => mock.polls >= 2, 'two polls');
  await page.click('#chat-tab');
  await page.waitForFunction(() => document.querySelector('#server-panel').hidden);
  const polls = mock.polls;
  await page.clock.install();
  await page.clock.runFor(5000);
  assert.ok(mock.polls <= polls + 1, `${mock.polls - polls} polls of a hidden tab`);
});

test('a server that fails, is gone, or has no plan', async (t) => {
  const { page, mock } = await open(t);
  mock.plan = null;
  mock.status = null;
  await page.click('#server-tab');
  await page.waitForSelector('#status-problem:has-text("device lost")');
  await page.waitForSelector('#no-plan-reason:has-text("no picture of the plan")');
  mock.status = { model: null };
  await page.waitForSelector('#status-model:text-is("No model is loaded")');
  assert.equal(await page.isVisible('#status-problem'), false);
  mock.plan = '<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"><script>alert(1)</script></svg>';
  await page.click('#retry-plan');
  await page.waitForSelector('#plan:not([hidden])');
  mock.server.closeAllConnections();
  mock.server.close();
  await page.waitForSelector('#status-problem:has-text("cannot be reached")');
});
