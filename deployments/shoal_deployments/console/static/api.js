// Requests to this server: the key goes with them, and a refusal is a sentence.

import { askForKey, currentKey } from "./key.js";

/** What went wrong, in a sentence for the user. */
export class ApiError extends Error {
  constructor(message, status = null) {
    super(message);
    this.status = status;
  }
}

/**
 * The response to a request that was answered well.
 *
 * Where the server wants a key, the user is asked for one, unless `asks` is false. Throws ApiError
 * for what the server refuses, and where it cannot be reached, be it within `deadlineMs`.
 */
export async function request(path, options = {}, { asks = true, deadlineMs = null } = {}) {
  for (;;) {
    const key = currentKey();
    const response = await reach(path, withKey(options, key), deadlineMs);
    if (response.ok) {
      return response;
    }
    const error = new ApiError(await sentence(response), response.status);
    if (response.status !== 401) {
      throw error;
    }
    const hasChanged = currentKey() !== key;
    if (!hasChanged && !(asks && (await askForKey(error.message)))) {
      throw error;
    }
  }
}

/** The name of the model that is served. */
export async function modelName() {
  const models = await (await request("v1/models")).json();
  return models.data[0].id;
}

function withKey(options, key) {
  if (key === null) {
    return options;
  }
  return { ...options, headers: { ...options.headers, Authorization: `Bearer ${key}` } };
}

async function reach(path, options, deadlineMs) {
  const deadline = deadlineMs === null ? {} : { signal: AbortSignal.timeout(deadlineMs) };
  try {
    return await fetch(path, { ...options, ...deadline });
  } catch (error) {
    if (options.signal?.aborted) {
      throw error;
    }
    throw new ApiError("The server cannot be reached.");
  }
}

async function sentence(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    // Something between this page and the server has answered.
    return `The request was answered with status ${response.status}.`;
  }
}
