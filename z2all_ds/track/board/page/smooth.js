// Smoothing that looks the same whether a curve came in 200 points or in 2,000.

/**
 * Exponential mean over about `window` records, corrected for its start. A point that stands for
 * many records has their weight: the past fades by records, not by points.
 */
export function smooth(means, weights, window) {
  let sum = 0;
  let weightSum = 0;
  return means.map((mean, place) => {
    const fade = Math.exp(-(weights[place] || 1) / window);
    if (mean === null) return null;
    sum = fade * sum + (1 - fade) * mean;
    weightSum = fade * weightSum + (1 - fade);
    return sum / weightSum;
  });
}
