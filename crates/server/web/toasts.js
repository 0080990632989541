// Short notices at the edge of the page.

import { byId, el, iconButton } from './dom.js';

const SHOWN_FOR = 8000;

export class Toasts {
  constructor() {
    this.region = byId('toasts');
    addEventListener('pagehide', () => this.closeAll());
  }

  /** Shows a sentence, with a button if there is an `action`. `onclose` is called unless the button was pressed. */
  show(sentence, { action, onaction, onclose, failure = false } = {}) {
    let open = true;
    const close = (how) => {
      if (!open) return;
      open = false;
      clearTimeout(timer);
      toast.remove();
      how?.();
    };
    const toast = el(
      'div',
      { class: failure ? 'toast failure' : 'toast', role: failure ? 'alert' : 'status' },
      el('span', {}, sentence),
      action && el('button', { type: 'button', class: 'button', onclick: () => close(onaction) }, action),
      iconButton('close', 'Close notice', () => close(onclose)),
    );
    toast.close = () => close(onclose);
    // Failures stay until they are closed.
    const timer = failure ? null : setTimeout(() => close(onclose), SHOWN_FOR);
    this.region.append(toast);
  }

  closeAll() {
    for (const toast of Array.from(this.region.children)) toast.close();
  }
}
