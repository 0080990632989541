// Themes, small screens, the keyboard, and what screen readers get.

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { answered, ask, open, texts } from './browser.mjs';

const RICH = [
  '# Heading',
  'Text with `code`, **strong** and [a link](https://example.test/a/very/long/path/that/does/not/break/anywhere/at/all/really).',
  '| a | b | c | d | e | f | g |\n|-|-|-|-|-|-|-|\n| one long cell | two long cells | three long cells | four | five long | six long | seven |',
  `\`\`\`js\n${'const x = 1; '.repeat(30)}\n\`\`\``,
  `${'unbroken'.repeat(60)}`,
  '- item\n  - nested item',
  '> quote',
].join('\n\n');

const rich = (reply) => {
  reply.thought('Thinking about it.');
  reply.content(RICH);
  reply.done({ prompt: 123456, cached: 12345 });
};

const overflow = (page) =>
  page.evaluate(() => {
    const wide = Array.from(document.querySelectorAll('body *')).filter(
      (element) =>
        element.getClientRects().length > 0 &&
        !element.closest('.code, .table, .visually-hidden, svg') &&
        element.getBoundingClientRect().right > innerWidth + 1,
    );
    return [document.documentElement.scrollWidth > innerWidth, wide.map((element) => element.outerHTML.slice(0, 80))];
  });

test('nothing overflows at 360 pixels', async (t) => {
  const { page, mock } = await open(t, { viewport: { width: 360, height: 700 }, hasTouch: true, isMobile: true });
  mock.models = ['a-very-long-model-name-with-quantization-q4_k_m-and-more'];
  mock.answer = rich;
  await page.reload();
  await page.waitForSelector('html[data-ready]', { state: 'attached' });
  assert.deepEqual(await overflow(page), [false, []]);
  await ask(page, `A question ${'x'.repeat(200)}`);
  assert.deepEqual(await overflow(page), [false, []]);
  for (const selector of ['#open-settings', '#server-tab', '#chat-tab', '#open-sidebar']) {
    await page.tap(selector);
    assert.deepEqual(await overflow(page), [false, []], selector);
    const small = await page.evaluate(() =>
      Array.from(document.querySelectorAll('button, select, summary, input'))
        .filter(
          (element) =>
            element.checkVisibility({ opacityProperty: true }) &&
            !element.closest('[inert]') &&
            element.getBoundingClientRect().width > 0,
        )
        .map((element) => ({ name: element.id || element.className, box: element.getBoundingClientRect() }))
        .filter(({ box }) => box.height < 36 || box.width < 27)
        .map(({ name, box }) => `${name} ${box.width}x${box.height}`),
    );
    assert.deepEqual(small, [], selector);
    if (selector === '#open-settings') await page.tap('#close-settings');
  }
  // The list covers the page and closes when a conversation is opened.
  await page.tap('.item .open');
  await page.waitForFunction(() => !document.querySelector('#sidebar').classList.contains('open'));
  await page.tap('#open-sidebar');
  await page.tap('#scrim', { position: { x: 350, y: 400 } });
  await page.waitForFunction(() => !document.querySelector('#sidebar').classList.contains('open'));
});

/** The contrast of a text with its background. */
const contrasts = (page) =>
  page.evaluate(() => {
    const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    const parse = (colour) => {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      return Array.from(canvas.getImageData(0, 0, 1, 1).data);
    };
    const luminance = ([r, g, b]) =>
      [r, g, b]
        .map((v) => v / 255)
        .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
        .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
    const ground = (element) => {
      for (let at = element; at; at = at.parentElement) {
        const colour = parse(getComputedStyle(at).backgroundColor);
        if (colour[3] === 255) return colour;
      }
      return [255, 255, 255];
    };
    const own = (element) => Array.from(element.childNodes).some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
    return Array.from(document.querySelectorAll('body *'))
      .filter((element) => own(element) && element.checkVisibility() && !element.closest('[disabled], option, .visually-hidden'))
      .map((element) => {
        const [a, b] = [luminance(parse(getComputedStyle(element).color)), luminance(ground(element))];
        return {
          text: `${element.className || element.id || element.nodeName}: ${element.textContent.slice(0, 30)}`,
          ratio: (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05),
        };
      })
      .filter(({ ratio }) => ratio < 4.5)
      .map(({ text, ratio }) => `${text} ${ratio.toFixed(2)}`);
  });

test('light and dark follow the system and the switch, and are legible', async (t) => {
  const { page, mock } = await open(t, { colorScheme: 'dark' });
  mock.answer = (reply) => {
    reply.content(`${RICH}\n\n\`\`\`py\n@meta\ndef f(x: int) -> str:  # comment\n    return "s" + 5\n\`\`\``);
    reply.event({ error: { message: 'broken' } });
    reply.response.end();
  };
  await ask(page, 'Hi');
  await page.click('#open-settings');
  await page.fill('#setting-schema', '{');
  await page.keyboard.press('Escape');
  const ground = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const dark = await ground();
  assert.deepEqual(await contrasts(page), [], 'dark');
  await page.click('#theme');
  const light = await ground();
  assert.equal(light, 'rgb(255, 255, 255)');
  assert.deepEqual(await contrasts(page), [], 'light');
  await page.click('#theme');
  assert.equal(await ground(), dark);
  await page.emulateMedia({ colorScheme: 'light' });
  assert.equal(await ground(), dark);
  await page.reload();
  await page.waitForSelector('html[data-ready]', { state: 'attached' });
  assert.equal(await ground(), dark);
  await page.click('#theme');
  assert.equal(await ground(), light);
  await page.click('#server-tab');
  await page.waitForSelector('.tile dd:text-is("42.5")');
  assert.deepEqual(await contrasts(page), [], 'server, light');
  await page.emulateMedia({ colorScheme: 'dark' });
  assert.deepEqual(await contrasts(page), [], 'server, dark');
});

const focused = (page) =>
  page.evaluate(
    () => document.activeElement.id || document.activeElement.getAttribute('aria-label') || document.activeElement.textContent,
  );

/** Presses Tab until the element is reached. */
async function tabTo(page, name, key = 'Tab') {
  for (let presses = 0; presses < 60; presses += 1) {
    await page.keyboard.press(key);
    if ((await focused(page)).trim() === name) return;
  }
  assert.fail(`${name} is not reached by ${key}`);
}

test('a conversation with the keyboard alone', async (t) => {
  const { page, mock } = await open(t);
  let number = 0;
  mock.answer = async (reply, body) => {
    number += 1;
    reply.content(`answer ${number}`);
    if (body.messages.at(-1).content === 'wait') await reply.closed;
    else reply.done();
  };
  assert.equal(await focused(page), 'input');
  await tabTo(page, 'Skip to the message field', 'Shift+Tab');
  await page.keyboard.press('Enter');
  assert.equal(await focused(page), 'input');
  await page.keyboard.type('first line');
  await page.keyboard.press('Shift+Enter');
  await page.keyboard.type('second line');
  await page.keyboard.press('Enter');
  await answered(page);
  assert.deepEqual(await texts(page), ['first line\nsecond line', 'answer 1']);
  // Regenerate, and go through the versions.
  await page.keyboard.press('Alt+r');
  await answered(page);
  await page.keyboard.press('Alt+,');
  assert.equal((await texts(page))[1], 'answer 1');
  await page.keyboard.press('Alt+.');
  assert.equal((await texts(page))[1], 'answer 2');
  // Edit by the arrow key.
  await page.keyboard.press('Alt+i');
  await page.keyboard.press('ArrowUp');
  assert.equal(await focused(page), 'Edit message');
  await page.keyboard.press('Control+a');
  await page.keyboard.type('changed');
  await page.keyboard.press('Enter');
  await answered(page);
  assert.deepEqual(await texts(page), ['changed', 'answer 3']);
  // Stop by Escape.
  await page.keyboard.press('Alt+i');
  await page.keyboard.type('wait');
  await page.keyboard.press('Enter');
  await page.waitForSelector('.message.streaming p:text-is("answer 4")');
  await page.keyboard.press('Escape');
  await answered(page);
  // Buttons are reached by Tab, backwards from the field.
  await page.keyboard.press('Alt+i');
  await tabTo(page, 'Regenerate', 'Shift+Tab');
  const outline = await page.evaluate(() => getComputedStyle(document.activeElement).outlineStyle);
  assert.equal(outline, 'solid');
  // The other tab by arrow keys.
  await tabTo(page, 'chat-tab', 'Shift+Tab');
  await page.keyboard.press('ArrowRight');
  assert.equal(await focused(page), 'server-tab');
  assert.equal(await page.isVisible('#server-panel'), true);
  await page.keyboard.press('Alt+t');
  // Rename and delete in the list.
  await page.keyboard.press('Alt+n');
  assert.equal(await focused(page), 'input');
  await page.keyboard.type('another');
  await page.keyboard.press('Enter');
  await answered(page);
  await page.keyboard.press('Control+k');
  assert.equal(await focused(page), 'search');
  await page.keyboard.press('Tab');
  await page.keyboard.press('ArrowDown');
  await page.keyboard.press('F2');
  await page.keyboard.press('Control+a');
  await page.keyboard.type('renamed');
  await page.keyboard.press('Enter');
  await page.waitForSelector('.item .open:has-text("renamed")');
  assert.equal((await focused(page)).trim(), 'renamed');
  await page.keyboard.press('Enter');
  await page.waitForSelector('.bubble:text-is("changed")');
  // Settings and help open, take the focus, and give it back.
  await page.keyboard.press('Alt+s');
  assert.equal(await page.evaluate(() => document.activeElement.closest('#settings') !== null), true);
  await page.keyboard.press('Escape');
  assert.equal(await focused(page), 'open-settings');
  await page.keyboard.press('Control+/');
  assert.equal(await page.isVisible('#help'), true);
  assert.match(await page.innerText('#help'), /Regenerate the last answer/);
  await page.keyboard.press('Escape');
  assert.equal(await page.isVisible('#help'), false);
});

test('every control has a name, and regions have roles', async (t) => {
  const { page, mock } = await open(t);
  mock.answer = rich;
  await ask(page, 'Hi');
  const unnamed = await page.evaluate(() =>
    Array.from(document.querySelectorAll('button, input, textarea, select'))
      .filter(
        (element) =>
          element.type !== 'file' &&
          !(element.getAttribute('aria-label') || element.labels?.length || element.textContent.trim()),
      )
      .map((element) => element.outerHTML.slice(0, 100)),
  );
  assert.deepEqual(unnamed, []);
  const ids = await page.evaluate(() => Array.from(document.querySelectorAll('[id]'), ({ id }) => id));
  assert.equal(new Set(ids).size, ids.length);
  assert.equal(await page.getAttribute('#messages', 'role'), 'log');
  assert.equal(await page.getAttribute('.message.assistant', 'aria-busy'), 'false');
  assert.equal(await page.getAttribute('#announcements', 'aria-live'), 'polite');
});

test('the page follows an answer unless the reader scrolled up', async (t) => {
  const { page, mock } = await open(t, { viewport: { width: 800, height: 500 } });
  let more;
  const pause = () =>
    new Promise((resolve) => {
      more = resolve;
    });
  mock.answer = async (reply) => {
    reply.content('line\n\n'.repeat(60));
    await pause();
    reply.content('more\n\n'.repeat(60));
    await pause();
    reply.content('the end');
    reply.done();
  };
  const distance = () =>
    page.evaluate(() => {
      const scroller = document.querySelector('#scroller');
      return scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
    });
  const waitFor = (text, count) =>
    page.waitForFunction(
      ([wanted, number]) =>
        Array.from(document.querySelectorAll('.markdown p')).filter((p) => p.textContent === wanted).length === number,
      [text, count],
    );
  await page.fill('#input', 'long');
  await page.press('#input', 'Enter');
  await waitFor('line', 60);
  await page.waitForFunction(() => {
    const scroller = document.querySelector('#scroller');
    return scroller.scrollTop > 0 && scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 5;
  });
  await page.hover('#scroller');
  await page.mouse.wheel(0, -600);
  await page.waitForSelector('#to-end:not([hidden])');
  more();
  await waitFor('more', 60);
  assert.ok((await distance()) > 500);
  await page.click('#to-end');
  await page.waitForFunction(() => document.querySelector('#to-end').hidden);
  more();
  await answered(page);
  assert.ok((await distance()) < 60);
});
