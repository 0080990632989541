// Conversations in IndexedDB: whole ones, and beside them their titles for the list. Without IndexedDB (private windows of
// some browsers) they are kept in memory, until the page is closed.

const NAME = 'quadriga';
const CONVERSATIONS = 'conversations';
const TITLES = 'titles';

/** What the list shows of a conversation. */
function titleOf({ id, title, created, updated }) {
  return { id, title, created, updated };
}

function result(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function finished(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error ?? new DOMException('The transaction was aborted', 'AbortError'));
  });
}

/** A sentence for an error of the storage. */
export function storeError(error) {
  if (error?.name === 'QuotaExceededError') {
    return 'The browser’s storage is full: this conversation is kept only until the page is closed. Export it, or delete old ones.';
  }
  return `The browser could not store the conversation (${error?.message ?? error}). It is kept until the page is closed.`;
}

class DatabaseStore {
  persistent = true;

  constructor(database) {
    this.database = database;
    // Another tab wants to delete or upgrade the database.
    database.onversionchange = () => database.close();
  }

  transaction(mode) {
    const transaction = this.database.transaction([CONVERSATIONS, TITLES], mode);
    return { transaction, conversations: transaction.objectStore(CONVERSATIONS), titles: transaction.objectStore(TITLES) };
  }

  titles() {
    return result(this.transaction('readonly').titles.getAll());
  }

  async get(id) {
    return (await result(this.transaction('readonly').conversations.get(id))) ?? null;
  }

  /** Stores all of these, or none. */
  put(...conversations) {
    const to = this.transaction('readwrite');
    for (const conversation of conversations) {
      to.conversations.put(conversation);
      to.titles.put(titleOf(conversation));
    }
    const stored = finished(to.transaction);
    // Does not wait for the requests' events, which a page that is being closed no longer gets.
    to.transaction.commit();
    return stored;
  }

  remove(id) {
    const from = this.transaction('readwrite');
    from.conversations.delete(id);
    from.titles.delete(id);
    const removed = finished(from.transaction);
    from.transaction.commit();
    return removed;
  }

  /** Calls `visit` with each conversation, without holding all of them in memory. */
  each(visit) {
    return new Promise((resolve, reject) => {
      const request = this.transaction('readonly').conversations.openCursor();
      request.onerror = () => reject(request.error);
      request.onsuccess = () => {
        const cursor = request.result;
        if (!cursor) return resolve();
        visit(cursor.value);
        return cursor.continue();
      };
    });
  }
}

class MemoryStore {
  persistent = false;

  conversations = new Map();

  async titles() {
    return Array.from(this.conversations.values(), titleOf);
  }

  async get(id) {
    return structuredClone(this.conversations.get(id) ?? null);
  }

  async put(...conversations) {
    for (const conversation of conversations) this.conversations.set(conversation.id, structuredClone(conversation));
  }

  async remove(id) {
    this.conversations.delete(id);
  }

  async each(visit) {
    for (const conversation of this.conversations.values()) visit(structuredClone(conversation));
  }
}

export async function openStore() {
  try {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore(CONVERSATIONS, { keyPath: 'id' });
      request.result.createObjectStore(TITLES, { keyPath: 'id' });
    };
    return new DatabaseStore(await result(request));
  } catch {
    return new MemoryStore();
  }
}

/** Small values such as the theme. A browser that refuses them loses nothing but convenience. */
export const preferences = {
  get(name, otherwise = '') {
    try {
      return localStorage.getItem(`quadriga.${name}`) ?? otherwise;
    } catch {
      return otherwise;
    }
  },
  set(name, value) {
    try {
      localStorage.setItem(`quadriga.${name}`, value);
    } catch {
      /* kept by the page that is open */
    }
  },
};

/** Values that end with the tab: the API key and drafts. */
export const session = {
  get(name) {
    try {
      return sessionStorage.getItem(`quadriga.${name}`) ?? '';
    } catch {
      return '';
    }
  },
  set(name, value) {
    try {
      if (value) sessionStorage.setItem(`quadriga.${name}`, value);
      else sessionStorage.removeItem(`quadriga.${name}`);
    } catch {
      /* kept by the page that is open */
    }
  },
};
